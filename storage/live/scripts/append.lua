-- Append journal entries; the seq is the stream id, so an entry cannot be there twice.
-- KEYS[1]  stream: journal, ids are seq-0
-- KEYS[2]  set: runs with a journal
-- ARGV[1]  run
-- ARGV[2]  seq the caller believes to be the last one ('' = does not matter)
-- ARGV[3..]  seq, encoded entry, seq, encoded entry, ... ascending
-- Returns the last seq held afterwards; below ARGV[2] it means that nothing was taken.
local last = 0
local top = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if #top > 0 then
  last = tonumber(string.match(top[1][1], '^%d+'))
end
if ARGV[2] ~= '' and last < tonumber(ARGV[2]) then
  return last
end
for i = 3, #ARGV, 2 do
  local seq = tonumber(ARGV[i])
  if seq > last then
    redis.call('XADD', KEYS[1], ARGV[i] .. '-0', 'd', ARGV[i + 1])
    last = seq
  end
end
redis.call('SADD', KEYS[2], ARGV[1])
return last
