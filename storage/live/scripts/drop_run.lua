-- Forget a run, if the recorder has all of its journal.
-- KEYS[1]  zset: run -> updated_at
-- KEYS[2]  set: runs with a journal
-- KEYS[3]  stream: journal       KEYS[4] string: acknowledged seq
-- KEYS[5]  hash: newest racks    KEYS[6] zset: proposals
-- KEYS[7]  hash: snapshot        KEYS[8] stream: commands
-- ARGV     run, prefix of rack history keys, prefix of proposal keys
-- Returns 1 when it was forgotten. Results of commands go by their own time to live.
local top = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)
if #top > 0 then
  local last = tonumber(string.match(top[1][1], '^%d+'))
  if last > tonumber(redis.call('GET', KEYS[4]) or '0') then
    return 0
  end
end
for _, rack in ipairs(redis.call('HKEYS', KEYS[5])) do
  redis.call('DEL', ARGV[2] .. rack)
end
for _, id in ipairs(redis.call('ZRANGE', KEYS[6], 0, -1)) do
  redis.call('DEL', ARGV[3] .. id)
end
redis.call('DEL', KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8])
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('SREM', KEYS[2], ARGV[1])
return 1
