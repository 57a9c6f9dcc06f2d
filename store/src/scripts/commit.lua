-- Writes a group if the token still holds the mutex and the stored stamp is the expected one.
-- KEYS: 1 metadata, 2 mutex, 3 history, 4 tombstone
-- ARGV: 1 token, 2 to 4 expected stamp, 5 history entry or '', 6 number of items that follow as field and
--       value to set; the rest are fields to remove
local FIRST = 7
local holder, foreign = holder_of(KEYS[2])
if foreign then
  return { 'mutex_type', foreign }
end
if holder ~= ARGV[1] then
  return { 'conflict', 'mutex_lost' }
end
local conflict = conflict_of(KEYS[1], ARGV[2], ARGV[3], ARGV[4])
if conflict then
  redis.pcall('DEL', KEYS[2])
  return { 'conflict', conflict }
end

local last_set = FIRST + tonumber(ARGV[6]) - 1
call_in_chunks(redis.call, 'HSET', KEYS[1], FIRST, last_set)
-- A field that could not be removed is ignored by every load, a TTL is reported by the next enter.
call_in_chunks(redis.pcall, 'HDEL', KEYS[1], last_set + 1, #ARGV)
local persisted = redis.pcall('PERSIST', KEYS[1]) == 1 and 1 or 0
-- A record that is written lives: a tombstone beside it (of a group that was restored) would make its loss pass
-- for a deletion.
redis.pcall('DEL', KEYS[4])
local history_error = append_history(KEYS[3], ARGV[5])
redis.pcall('DEL', KEYS[2])
return { 'applied', persisted, history_error }
