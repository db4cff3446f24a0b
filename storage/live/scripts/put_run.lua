-- Replace the snapshot of a run unless a newer one is stored.
-- KEYS[1]  zset: run -> updated_at
-- KEYS[2]  hash: snapshot of the run (body, updated_at, generation)
-- ARGV     run, body, updated_at, generation, number of runs to keep
-- Returns the runs beyond that number, quietest first (empty when nothing was written).
-- A retry writes the same again.
local stored = redis.call('HMGET', KEYS[2], 'updated_at', 'generation')
if stored[1] and (tonumber(ARGV[3]) < tonumber(stored[1])
    or tonumber(ARGV[4]) < tonumber(stored[2])) then
  return {}
end
redis.call('HSET', KEYS[2], 'body', ARGV[2], 'updated_at', ARGV[3], 'generation', ARGV[4])
redis.call('ZADD', KEYS[1], ARGV[3], ARGV[1])
return redis.call('ZRANGE', KEYS[1], 0, -(tonumber(ARGV[5]) + 1))
