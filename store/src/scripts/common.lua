-- Put in front of every script (a Redis script cannot import another one).
--
-- Two rules hold for all scripts that write. Whatever can be refused (a check, memory, permissions, a
-- read-only server) is refused before or by the first write, so that an error reply always means that
-- nothing was written. What comes after the first write is called with pcall and cannot fail the script.

-- How many items of ARGV go into one call: Lua's stack takes some 8,000.
local CHUNK = 1000

-- Whether pcall returned an error.
local function is_error(reply)
  return type(reply) == 'table' and reply.err ~= nil
end

-- The token in a mutex key, or false. Second result: the key's type, if it is no string.
local function holder_of(mutex)
  local kind = redis.call('TYPE', mutex).ok
  if kind == 'none' then
    return false
  end
  if kind ~= 'string' then
    return false, kind
  end
  return redis.call('GET', mutex)
end

-- Tells who holds the mutex that another one wants. One that would last longer than whoever asks may hold it is cut to that:
-- Redis time has gone back since it was taken, or somebody set it without an end, and the group would wait as long. A
-- holder that is alive renews it.
local function busy(mutex, holder, ttl)
  local left = redis.call('PTTL', mutex)
  if left < 0 or left > tonumber(ttl) then
    redis.pcall('PEXPIRE', mutex, ttl)
  end
  return { 'busy', holder }
end

-- Whether the hash has this stamp. Numbers are compared as texts: Lua's would lose digits above 2^53.
local function has_stamp(metadata, revision, live_revision, write_id)
  local stored = redis.call('HMGET', metadata, 'revision', 'liveRevision', 'writeId')
  return (stored[1] or '') == revision
    and (stored[2] or '0') == live_revision
    and (stored[3] or '') == write_id
end

-- What forbids writing over this key, or nil.
local function conflict_of(metadata, revision, live_revision, write_id)
  local kind = redis.call('TYPE', metadata).ok
  if kind == 'none' then
    return 'missing'
  end
  if kind ~= 'hash' then
    return 'wrong_type'
  end
  if not has_stamp(metadata, revision, live_revision, write_id) then
    return 'moved'
  end
  return nil
end

-- The fields of a tombstone; empty when there is none or when the key holds something else.
local function tombstone_of(tombstone)
  if redis.call('TYPE', tombstone).ok ~= 'hash' then
    return {}
  end
  return redis.call('HGETALL', tombstone)
end

-- Calls a command on a key with ARGV[first] to ARGV[last], in as many calls as it takes.
local function call_in_chunks(call, command, key, first, last)
  for from = first, last, CHUNK do
    call(command, key, unpack(ARGV, from, math.min(from + CHUNK - 1, last)))
  end
end

-- Appends to the history, which is for people only: returns the error, if there was one, and never fails.
local function append_history(history, entry)
  if entry == '' then
    return ''
  end
  local reply = redis.pcall('XADD', history, 'MAXLEN', '~', '1000', '*', 'entry', entry)
  if is_error(reply) then
    return reply.err
  end
  return ''
end
