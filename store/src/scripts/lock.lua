-- Takes a mutex that stands for itself (the one of a stream prefix), or says who holds it.
-- KEYS: 1 mutex
-- ARGV: 1 token, 2 TTL in ms
local holder, foreign = holder_of(KEYS[1])
if foreign then
  return { 'mutex_type', foreign }
end
if holder and holder ~= ARGV[1] then
  return busy(KEYS[1], holder, ARGV[2])
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return { 'locked' }
