-- Replace the newest record of some racks of one run and add them to their histories.
-- KEYS[1]   hash: rack -> newest record
-- KEYS[i+1] stream: history of the i-th rack, its id is the record's time in ms
-- ARGV[1]   records to keep per rack, then for each rack: rack, time in ms, record
-- A retry replaces the record by itself; a time already in the history is not added again.
for i = 2, #KEYS do
  local at = 2 + (i - 2) * 3
  redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 2])
  local top = redis.call('XREVRANGE', KEYS[i], '+', '-', 'COUNT', 1)
  if #top == 0 or tonumber(string.match(top[1][1], '^%d+')) < tonumber(ARGV[at + 1]) then
    redis.call('XADD', KEYS[i], 'MAXLEN', '~', ARGV[1], ARGV[at + 1] .. '-0', 'd', ARGV[at + 2])
  end
end
return #KEYS - 1
