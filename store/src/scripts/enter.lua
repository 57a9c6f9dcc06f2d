-- Takes the mutex of a group, or says who holds it, and returns what is stored.
-- KEYS: 1 metadata, 2 mutex, 3 tombstone
-- ARGV: 1 token, 2 token that may be taken over or '', 3 mutex TTL in ms, 4 '1' if a stamp is remembered,
--       5 to 7 that stamp
local holder, foreign = holder_of(KEYS[2])
if foreign then
  return { 'mutex_type', foreign }
end
if holder and holder ~= ARGV[1] and (ARGV[2] == '' or holder ~= ARGV[2]) then
  return busy(KEYS[2], holder, ARGV[3])
end

local time = redis.call('TIME')
local kind = redis.call('TYPE', KEYS[1]).ok
local reply
if kind == 'none' then
  reply = { 'missing', time[1], time[2], tombstone_of(KEYS[3]) }
elseif kind ~= 'hash' then
  reply = { 'wrong_type', time[1], time[2], kind }
else
  local has_ttl = redis.call('PTTL', KEYS[1]) >= 0 and 1 or 0
  if ARGV[4] == '1' and has_stamp(KEYS[1], ARGV[5], ARGV[6], ARGV[7]) then
    reply = { 'unchanged', time[1], time[2], has_ttl }
  else
    reply = { 'loaded', time[1], time[2], has_ttl, redis.call('HGETALL', KEYS[1]) }
  end
end

redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[3])
return reply
