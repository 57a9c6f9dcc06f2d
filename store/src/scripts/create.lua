-- Creates a group's key where there is none, and keeps the mutex.
-- KEYS: 1 metadata, 2 mutex, 3 history, 4 tombstone
-- ARGV: 1 token, 2 mutex TTL in ms, 3 history entry or '', 4 '1' if the caller read a tombstone, 5 to 10 its
--       names and numbers, then field and value to set
local FIRST = 11

-- A number as the loading side reads it: anything but a plain decimal counts as 0.
local function reached(text)
  if text and #text <= 19 and (text == '0' or string.find(text, '^[1-9]%d*$')) then
    return text
  end
  return '0'
end

local function tombstone_moved()
  if redis.call('TYPE', KEYS[4]).ok ~= 'hash' then
    return ARGV[4] == '1'
  end
  if ARGV[4] ~= '1' then
    return true
  end
  local stored = redis.call('HMGET', KEYS[4], 'streamPrefix', 'consumerGroup', 'groupEpoch', 'metadataVersion',
    'storeRevision', 'liveRevision')
  if (stored[1] or '') ~= ARGV[5] or (stored[2] or '') ~= ARGV[6] then
    return true
  end
  for at = 3, 6 do
    if reached(stored[at]) ~= ARGV[4 + at] then
      return true
    end
  end
  return false
end

local holder, foreign = holder_of(KEYS[2])
if foreign then
  return { 'mutex_type', foreign }
end
if holder and holder ~= ARGV[1] then
  return { 'conflict', 'mutex_lost' }
end
local conflict
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'hash' then
  conflict = 'exists'
elseif kind ~= 'none' then
  conflict = 'wrong_type'
elseif tombstone_moved() then
  conflict = 'tombstone_moved'
end
if conflict then
  if holder then
    redis.pcall('DEL', KEYS[2])
  end
  return { 'conflict', conflict }
end

redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
-- The mutex is the first write, so a refused HSET has to take it back.
local refused
call_in_chunks(function(...)
  if not refused then
    local reply = redis.pcall(...)
    if is_error(reply) then
      refused = reply
    end
  end
end, 'HSET', KEYS[1], FIRST, #ARGV)
if refused then
  redis.pcall('DEL', KEYS[2])
  return refused
end
redis.pcall('DEL', KEYS[4])
return { 'applied', 0, append_history(KEYS[3], ARGV[3]) }
