-- Puts a group's record back, all of it or nothing, and releases the mutex.
-- KEYS: 1 metadata, 2 mutex, 3 tombstone, 4 history
-- ARGV: 1 token, 2 the type that the key had when the mutex was taken, 3 to 5 revision, liveRevision and writeId that it
--       had, each '' if absent, 6 number of items that follow as field and value to set, 7 number of items after these
--       as id and text of history entries, which are put back where there is no history; 8 one more history entry or
--       '', then these items; the rest are fields to remove
--
-- As in the daemon's scripts: whatever can be refused is refused by the first write, and what comes after is called with
-- pcall, so that an error reply always means that nothing was written.
local CHUNK = 1000
local FIRST = 9

if redis.call('TYPE', KEYS[2]).ok ~= 'string' or redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return { 'mutex_lost' }
end
local kind = redis.call('TYPE', KEYS[1]).ok
-- Asked before anything is written.
local history = redis.call('TYPE', KEYS[4]).ok
if kind ~= ARGV[2] then
  redis.pcall('DEL', KEYS[2])
  return { 'moved', kind }
end
if kind == 'hash' then
  local stored = redis.call('HMGET', KEYS[1], 'revision', 'liveRevision', 'writeId')
  for at = 1, 3 do
    if (stored[at] or '') ~= ARGV[2 + at] then
      redis.pcall('DEL', KEYS[2])
      return { 'moved', kind }
    end
  end
elseif kind ~= 'none' then
  -- A script that began with DEL is not refused for want of memory.
  redis.call('DEL', KEYS[1])
end

local last_set = FIRST + tonumber(ARGV[6]) - 1
for from = FIRST, last_set, CHUNK do
  redis.call('HSET', KEYS[1], unpack(ARGV, from, math.min(from + CHUNK - 1, last_set)))
end
local last_entry = last_set + tonumber(ARGV[7])
for from = last_entry + 1, #ARGV, CHUNK do
  redis.pcall('HDEL', KEYS[1], unpack(ARGV, from, math.min(from + CHUNK - 1, #ARGV)))
end
redis.pcall('PERSIST', KEYS[1])
-- The record lives: a tombstone beside it would make its loss pass for a deletion.
redis.pcall('DEL', KEYS[3])
if last_entry > last_set and history == 'none' then
  for at = last_set + 1, last_entry, 2 do
    redis.pcall('XADD', KEYS[4], ARGV[at], 'entry', ARGV[at + 1])
  end
end
if ARGV[8] ~= '' then
  redis.pcall('XADD', KEYS[4], 'MAXLEN', '~', '1000', '*', 'entry', ARGV[8])
end
redis.pcall('DEL', KEYS[2])
return { 'restored' }
