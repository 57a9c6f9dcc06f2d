-- Proves that a shard is read to its end, or says what waits; nothing is written.
-- KEYS: 1 the shard's stream
-- ARGV: as coordinated_and_starts takes them
return prove(KEYS[1], coordinated_and_starts())
