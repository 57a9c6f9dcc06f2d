-- Deletes a shard's stream, if in this very moment it is proven that it is read to its end.
-- KEYS: 1 the shard's stream
-- ARGV: as coordinated_and_starts takes them; without starts, the proof has to be whole
local coordinated = coordinated_and_starts()
local proof = prove(KEYS[1], coordinated, {}, WALKED_AT_ONCE)
if proof[1] == 'proven' then
  -- Not DEL: to free a long stream takes long.
  redis.call('UNLINK', KEYS[1])
end
return proof
