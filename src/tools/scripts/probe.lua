-- Tries every command of the coordinator on a key of the doctor's own, and tells which were refused and in what words.
-- KEYS: 1 the key. It is a string that ends within a second, so that whatever would write something else into it is
--       answered WRONGTYPE, and nothing is left behind.
-- { { command, words }, … }; the first row's command is SET if the others could not be tried.
local refused = {}

local function try(name, ...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err and not string.find(reply.err, 'WRONGTYPE', 1, true) then
    refused[#refused + 1] = { name, reply.err }
    return false
  end
  return true
end

local key = KEYS[1]
if not try('SET', 'SET', key, 'doctor', 'PX', '1000') then
  return refused
end
try('GET', 'GET', key)
try('TYPE', 'TYPE', key)
try('PTTL', 'PTTL', key)
try('PEXPIRE', 'PEXPIRE', key, '1000')
try('PERSIST', 'PERSIST', key)
redis.pcall('SET', key, 'doctor', 'PX', '1000')
try('HGETALL', 'HGETALL', key)
try('HMGET', 'HMGET', key, 'f')
try('HSET', 'HSET', key, 'f', 'v')
try('HDEL', 'HDEL', key, 'f')
try('XADD', 'XADD', key, '*', 'f', 'v')
try('XREVRANGE', 'XREVRANGE', key, '+', '-', 'COUNT', '1')
try('SMEMBERS', 'SMEMBERS', key)
try('SISMEMBER', 'SISMEMBER', key, 'm')
try('SADD', 'SADD', key, 'm')
try('SREM', 'SREM', key, 'm')
try('XGROUP|CREATE', 'XGROUP', 'CREATE', key, 'g', '0')
try('XINFO|GROUPS', 'XINFO', 'GROUPS', key)
try('XINFO|STREAM', 'XINFO', 'STREAM', key)
try('XRANGE', 'XRANGE', key, '-', '+', 'COUNT', '1')
try('XPENDING', 'XPENDING', key, 'g')
try('XACK', 'XACK', key, 'g', '0-0')
try('MEMORY|USAGE', 'MEMORY', 'USAGE', key)
try('DEL', 'DEL', key)
try('UNLINK', 'UNLINK', key)
return refused
