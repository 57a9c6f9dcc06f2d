-- Proves that a shard is read to its end, or says what waits; nothing is written.
-- KEYS: 1 the shard's stream
-- ARGV: as coordinated_and_starts takes them
local coordinated, starts = coordinated_and_starts()
return prove(KEYS[1], coordinated, starts, WALKED)
