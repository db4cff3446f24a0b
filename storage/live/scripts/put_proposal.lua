-- Write a proposal if its revision is above the stored one; keep the newest proposals only.
-- KEYS[1]  hash: the proposal, its body opaque and its mutable fields beside it
-- KEYS[2]  zset: proposal -> created_at
-- ARGV     proposal, created_at, revision, proposals to keep, prefix of proposal keys,
--          then field, value, field, value, ...
-- Returns 1 when it was written. A retry finds its own revision and returns 0, unless the stored
-- body is the very same.
local stored = redis.call('HMGET', KEYS[1], 'revision', 'body')
if stored[1] and tonumber(ARGV[3]) <= tonumber(stored[1]) then
  local same = false
  if tonumber(ARGV[3]) == tonumber(stored[1]) then
    for i = 6, #ARGV, 2 do
      if ARGV[i] == 'body' then
        same = ARGV[i + 1] == stored[2]
      end
    end
  end
  return same and 1 or 0
end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], unpack(ARGV, 6))
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
local surplus = redis.call('ZRANGE', KEYS[2], 0, -(tonumber(ARGV[4]) + 1))
for _, id in ipairs(surplus) do
  redis.call('DEL', ARGV[5] .. id)
  redis.call('ZREM', KEYS[2], id)
end
return 1
