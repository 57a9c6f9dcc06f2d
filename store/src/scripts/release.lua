-- Gives a mutex back, if the token still holds it.
-- KEYS: 1 mutex
-- ARGV: 1 token
local holder, foreign = holder_of(KEYS[1])
if foreign then
  return { 'mutex_type', foreign }
end
if holder ~= ARGV[1] then
  return { 'lost' }
end
redis.call('DEL', KEYS[1])
return { 'held' }
