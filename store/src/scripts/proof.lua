-- The proof that a shard is read to its end (protocol 6, *Drain*), for the scripts that need it.
--
-- It changes nothing. Its work is bounded however much the stream holds: what is there is counted up to a
-- limit, and pending entries are walked in leaps. From a pending entry to the first record at or behind
-- it, from that record to the first pending entry at or behind it, and so on: a run of a million ghosts
-- (pending entries whose record is gone) or of a million acknowledged records is one leap.

-- Undelivered records and real pending entries are counted up to this many.
local COUNTED = 100
-- Records come with their content; what goes beyond these bytes is not fetched for the sake of a count.
local COUNTED_BYTES = 262144
-- How many commands (8 µs each) one call of a script may spend on pending entries: a proof that can go on,
-- and one that has to be whole.
local WALKED = 2000
local WALKED_AT_ONCE = 10000
-- How many of them where the answer is known already and only the figures are wanted.
local WALKED_FOR_FIGURES = 500
-- There is nothing behind this id; Redis refuses to look.
local LAST_ID = '18446744073709551615-18446744073709551615'

-- The start of a range behind an id, or nil.
local function behind(id)
  if id == LAST_ID then
    return nil
  end
  return '(' .. id
end

-- A flat list of names and values as a table.
local function named(pairs_of)
  local fields = {}
  for at = 1, #pairs_of, 2 do
    fields[pairs_of[at]] = pairs_of[at + 1]
  end
  return fields
end

-- Counts records behind an id. Second result: 1 if there may be more. Third: the first one's id.
local function records_behind(key, id)
  local start, counted, bytes, oldest = behind(id), 0, 0, ''
  local ask = 1
  while start do
    local records = redis.call('XRANGE', key, start, '+', 'COUNT', ask)
    if counted == 0 and #records > 0 then
      oldest = records[1][1]
    end
    counted = counted + #records
    if #records < ask then
      return counted, 0, oldest
    end
    for _, record in ipairs(records) do
      for _, text in ipairs(record[2]) do
        bytes = bytes + #text
      end
    end
    if counted >= COUNTED or bytes >= COUNTED_BYTES then
      return counted, 1, oldest
    end
    start = behind(records[#records][1])
    ask = math.min(ask * 2, COUNTED - counted)
  end
  return counted, 0, oldest
end

-- Walks a group's pending entries from a start on, until enough real ones were found, the commands are
-- spent, or the end is reached (`complete`). Up to `start` there is then no real one but those counted.
local function walk_pending(key, group, start, commands)
  local walk = { real = 0, oldest = '', complete = false, start = start, spent = 0 }
  local ask = 1
  while walk.real < COUNTED and walk.spent < commands do
    local entries = redis.call('XPENDING', key, group, walk.start, '+', ask)
    walk.spent = walk.spent + 1
    if #entries == 0 then
      walk.complete = true
      return walk
    end
    local leapt = false
    for _, entry in ipairs(entries) do
      local id = entry[1]
      local records = redis.call('XRANGE', key, id, '+', 'COUNT', 1)
      walk.spent = walk.spent + 1
      if #records == 0 then
        walk.complete = true
        return walk
      end
      if records[1][1] ~= id then
        walk.start = records[1][1]
        leapt = true
        break
      end
      if walk.real == 0 then
        walk.oldest = id
      end
      walk.real = walk.real + 1
      local start_behind = behind(id)
      if not start_behind then
        walk.complete = true
        return walk
      end
      walk.start = start_behind
    end
    ask = leapt and 1 or math.min(ask * 2, COUNTED)
  end
  return walk
end

-- Looks for what waits on a stream, for any consumer group. `coordinated`: names of groups that have to exist
-- on it. `starts`: by group, where to go on with its pending entries. `left`: the commands that may be spent
-- on them. Returns `rows` of what waits, `ghosts` (all of them), and `undecided`, groups and their starts, if
-- the commands were spent before anything was found. A row: group, reason, undelivered, 1 if that is at
-- least, pending, 1 if that is at most, ghosts, oldest id.
local function judge(key, coordinated, starts, left)
  local rows, go_on, all_ghosts = {}, {}, 0
  local decided, open = false, false
  local exists = {}
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', key)) do
    local group = named(info)
    exists[group.name] = true
    local undelivered, at_least, oldest = records_behind(key, group['last-delivered-id'])
    local real, at_most, reason = 0, 0, nil
    local ghosts = 0
    if undelivered > 0 then
      reason = 'UNDELIVERED'
    end
    if group.pending > 0 then
      local commands = reason and math.min(left, WALKED_FOR_FIGURES) or left
      local walk = walk_pending(key, group.name, starts[group.name] or '-', commands)
      left = left - walk.spent
      go_on[#go_on + 1] = group.name
      go_on[#go_on + 1] = walk.start
      if walk.real > 0 and not reason then
        reason, oldest = 'PENDING', walk.oldest
      end
      if walk.complete then
        real, ghosts = walk.real, group.pending - walk.real
      else
        real, at_most = group.pending, 1
        reason = reason or 'PENDING_UNDECIDED'
      end
    end
    all_ghosts = all_ghosts + ghosts
    if reason then
      rows[#rows + 1] = { group.name, reason, undelivered, at_least, real, at_most, ghosts, oldest }
      open = open or reason == 'PENDING_UNDECIDED'
      decided = decided or reason ~= 'PENDING_UNDECIDED'
    end
  end
  for _, name in ipairs(coordinated) do
    if not exists[name] then
      -- What it would have to read once it is created, at the beginning.
      local undelivered, at_least, oldest = records_behind(key, '0-0')
      rows[#rows + 1] = { name, 'GROUP_MISSING', undelivered, at_least, 0, 0, 0, oldest }
      decided = true
    end
  end
  return { rows = rows, ghosts = all_ghosts, undecided = open and not decided and go_on }
end

-- Proves that nothing on the key waits, or says what does.
--   { 'absent' }, { 'wrong_type', type }, { 'proven', ghosts },
--   { 'waits', rows }, or { 'undecided', rows, groups and their starts }
local function prove(key, coordinated, starts, left)
  local kind = redis.call('TYPE', key).ok
  if kind ~= 'none' and kind ~= 'stream' then
    return { 'wrong_type', kind }
  end
  -- Acknowledges nothing, and is refused where writes are: what a replica or a master cut off from its
  -- replicas does not have proves nothing.
  redis.call('XACK', key, '', '0-0')
  if kind == 'none' then
    return { 'absent' }
  end
  local found = judge(key, coordinated, starts, left)
  if found.undecided then
    return { 'undecided', found.rows, found.undecided }
  end
  if #found.rows > 0 then
    return { 'waits', found.rows }
  end
  return { 'proven', found.ghosts }
end

-- ARGV as the scripts take it: 1 number of coordinated groups, these, then groups and their starts.
local function coordinated_and_starts()
  local coordinated, starts = {}, {}
  local last = 1 + tonumber(ARGV[1])
  for at = 2, last do
    coordinated[#coordinated + 1] = ARGV[at]
  end
  for at = last + 1, #ARGV, 2 do
    starts[ARGV[at]] = ARGV[at + 1]
  end
  return coordinated, starts
end
