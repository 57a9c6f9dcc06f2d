-- Deletes a shard's stream, if in this very moment it is proven that it is read to its end, and not after an instant:
-- a call that was held up on its way must not meet a stream that was made anew since.
-- KEYS: 1 the shard's stream
-- ARGV: as coordinated_and_starts takes them; without starts, the proof has to be whole. Last: the instant, in
-- milliseconds of this server's TIME
local not_after = tonumber(table.remove(ARGV))
local time = redis.call('TIME')
if time[1] * 1000 + math.floor(time[2] / 1000) > not_after then
  return { 'too_late' }
end
local coordinated = coordinated_and_starts()
local proof = prove(KEYS[1], coordinated, {}, WALKED_AT_ONCE)
if proof[1] == 'proven' then
  -- Not DEL: to free a long stream takes long.
  redis.call('UNLINK', KEYS[1])
end
return proof
