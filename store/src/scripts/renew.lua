-- Extends a mutex for another TTL, if the token still holds it.
-- KEYS: 1 mutex
-- ARGV: 1 token, 2 TTL in ms
local holder, foreign = holder_of(KEYS[1])
if foreign then
  return { 'mutex_type', foreign }
end
if holder ~= ARGV[1] then
  return { 'lost' }
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return { 'held' }
