-- What there is to record, in one round trip.
-- KEYS[1]  set: runs with a journal
-- ARGV     prefix of a run's keys, suffix of its journal, suffix of its acknowledged seq
-- Returns run, last seq, acknowledged seq, run, ...
local found = {}
for _, run in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local top = redis.call('XREVRANGE', ARGV[1] .. run .. ARGV[2], '+', '-', 'COUNT', 1)
  found[#found + 1] = run
  found[#found + 1] = #top > 0 and tonumber(string.match(top[1][1], '^%d+')) or 0
  found[#found + 1] = tonumber(redis.call('GET', ARGV[1] .. run .. ARGV[3]) or '0')
end
return found
