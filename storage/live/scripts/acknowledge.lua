-- The recorder has everything up to a seq: trim, but keep a tail.
-- KEYS[1]  stream: journal, ids are seq-0
-- KEYS[2]  string: acknowledged seq
-- ARGV     seq, entries to keep as a tail
-- Never removes an entry above the acknowledged seq. A retry, or an older seq, changes nothing.
local seq = tonumber(redis.call('GET', KEYS[2]) or '0')
if tonumber(ARGV[1]) > seq then
  seq = tonumber(ARGV[1])
  redis.call('SET', KEYS[2], ARGV[1])
end
local top = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if #top > 0 then
  local last = tonumber(string.match(top[1][1], '^%d+'))
  local keep_from = math.min(seq, last - tonumber(ARGV[2])) + 1
  if keep_from > 1 then
    redis.call('XTRIM', KEYS[1], 'MINID', string.format('%.0f-0', keep_from))
  end
end
return seq
