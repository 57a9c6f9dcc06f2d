-- Tries every command that the coordinator's own keys need, and names those that the user may not run.
-- KEYS: 1 a key of nobody; it is there for a second at most, and only inside this script unless DEL is not allowed
-- { names, what SET is refused with for another reason, or '' }
local missing = {}

local function try(name, ...)
  local answer = redis.pcall(name, ...)
  local refused = type(answer) == 'table' and answer.err
  if not refused then
    return ''
  end
  for _, words in ipairs({ 'NOPERM', "can't run this command", 'ACL failure in script' }) do
    if string.find(refused, words, 1, true) then
      missing[#missing + 1] = name
      return nil
    end
  end
  return refused
end

local key = KEYS[1]
-- The first write: a server that takes none refuses it, and later ones of the same script no longer.
local trouble = try('SET', key, '', 'PX', '1000')
if trouble == '' then
  -- On a text these two are refused for the type, and leave nothing behind.
  try('HSET', key, 'field', 'value')
  try('SADD', key, 'member')
end
try('PEXPIRE', key, '1000')
try('DEL', key)
try('TIME')
try('TYPE', key)
try('GET', key)
try('PTTL', key)
try('PERSIST', key)
try('HGETALL', key)
try('HMGET', key, 'field')
try('HDEL', key, 'field')
try('SMEMBERS', key)
try('SISMEMBER', key, 'member')
try('SREM', key, 'member')
try('XREVRANGE', key, '+', '-', 'COUNT', '1')
try('XADD', key, 'NOMKSTREAM', '*', 'field', 'value')
return { missing, trouble or '' }
