-- Shows what a shard's key holds and how far it has been read; nothing is written.
-- KEYS: 1 the shard's stream
-- ARGV: 1 consumer group whose undelivered records are counted, 2 '1' if everything unread is wanted
-- { 'absent' }, { 'wrong_type', type }, or { 'stream', length, first id, last id, last generated id, memory,
-- groups, unread as rows of proof.lua }; what is not known is nil. A group: name, consumers, pending, cursor,
-- lag, undelivered or nil, 1 if that is at least
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'none' then
  return { 'absent' }
end
if kind ~= 'stream' then
  return { 'wrong_type', kind }
end

local function id_of(entry)
  return entry and entry[1]
end

local stream = named(redis.call('XINFO', 'STREAM', KEYS[1]))
local groups = {}
for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = named(info)
  local undelivered, at_least = false, 0
  if group.name == ARGV[1] then
    undelivered, at_least = records_behind(KEYS[1], group['last-delivered-id'])
  end
  groups[#groups + 1] = { group.name, group.consumers, group.pending, group['last-delivered-id'],
    group.lag or false, undelivered, at_least }
end
local unread = {}
if ARGV[2] == '1' then
  unread = judge(KEYS[1], { ARGV[1] }, {}, WALKED).rows
end
-- Older servers, and users without the right, do not tell.
local memory = redis.pcall('MEMORY', 'USAGE', KEYS[1])
if type(memory) ~= 'number' then
  memory = false
end
return { 'stream', stream.length, id_of(stream['first-entry']), id_of(stream['last-entry']),
  stream['last-generated-id'], memory, groups, unread }
