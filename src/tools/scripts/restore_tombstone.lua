-- Puts the tombstone of a deleted group back, unless there is a record or a tombstone.
-- KEYS: 1 metadata, 2 tombstone
-- ARGV: 1 how long it is to stay, in ms, then field and value
if redis.call('EXISTS', KEYS[1], KEYS[2]) > 0 then
  return 'exists'
end
redis.call('HSET', KEYS[2], unpack(ARGV, 2))
redis.pcall('PEXPIRE', KEYS[2], ARGV[1])
return 'restored'
