-- Keep a note for the audit, once.
-- KEYS[1]  string: set when the note of this id is kept
-- KEYS[2]  stream: notes
-- ARGV     encoded command or sign-in, run, code, notes to keep, seconds to remember the id
-- A retry finds KEYS[1] and changes nothing.
if redis.call('SET', KEYS[1], '1', 'NX', 'EX', ARGV[5]) then
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'd', ARGV[1], 'r', ARGV[2], 'c', ARGV[3])
end
return 1
