-- What there is to record, in one round trip.
-- ARGV     set of the runs with a journal (not among KEYS: it is only read), prefix of a run's keys,
--          suffix of its journal, suffix of its acknowledged seq
-- Returns run, last seq, acknowledged seq, run, ...
local found = {}
for _, run in ipairs(redis.call('SMEMBERS', ARGV[1])) do
  local top = redis.call('XREVRANGE', ARGV[2] .. run .. ARGV[3], '+', '-', 'COUNT', 1)
  found[#found + 1] = run
  found[#found + 1] = #top > 0 and tonumber(string.match(top[1][1], '^%d+')) or 0
  found[#found + 1] = tonumber(redis.call('GET', ARGV[2] .. run .. ARGV[4]) or '0')
end
return found
