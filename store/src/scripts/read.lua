-- Returns what is stored, without the mutex and without writing.
-- KEYS: 1 metadata, 2 tombstone
local time = redis.call('TIME')
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'none' then
  return { 'missing', time[1], time[2], tombstone_of(KEYS[2]) }
end
if kind ~= 'hash' then
  return { 'wrong_type', time[1], time[2], kind }
end
local has_ttl = redis.call('PTTL', KEYS[1]) >= 0 and 1 or 0
return { 'loaded', time[1], time[2], has_ttl, redis.call('HGETALL', KEYS[1]) }
