-- Deletes a group's key and history, leaves a tombstone, and releases the mutex.
-- KEYS: 1 metadata, 2 mutex, 3 history, 4 tombstone
-- ARGV: 1 token, 2 '1' if a stamp is expected, 3 to 5 that stamp, 6 TTL of the tombstone in ms, then field
--       and value of the tombstone; none of them: no tombstone is left
local FIRST = 7
local holder, foreign = holder_of(KEYS[2])
if foreign then
  return { 'mutex_type', foreign }
end
if holder ~= ARGV[1] then
  return { 'conflict', 'mutex_lost' }
end
if ARGV[2] == '1' then
  local conflict = conflict_of(KEYS[1], ARGV[3], ARGV[4], ARGV[5])
  if conflict then
    redis.pcall('DEL', KEYS[2])
    return { 'conflict', conflict }
  end
end

-- The tombstone first: one beside a key that could not be deleted says nothing to anybody, a deleted group
-- without its tombstone would start again below itself. DEL, because the key may hold something else, and
-- because a script that began with DEL is not refused for want of memory.
local function undone(reply)
  redis.pcall('DEL', KEYS[4])
  return reply
end
redis.call('DEL', KEYS[4])
if #ARGV >= FIRST then
  local written = redis.pcall('HSET', KEYS[4], unpack(ARGV, FIRST))
  if is_error(written) then
    return undone(written)
  end
  local expires = redis.pcall('PEXPIRE', KEYS[4], ARGV[6])
  if is_error(expires) then
    return undone(expires)
  end
end
local deleted = redis.pcall('DEL', KEYS[1], KEYS[3])
if is_error(deleted) then
  return undone(deleted)
end
redis.pcall('DEL', KEYS[2])
return { 'applied', 0, '' }
