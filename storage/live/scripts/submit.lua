-- Queue a command once; for a decision, check and change the proposal in the same step.
-- KEYS[1]  hash: first result of this command id
-- KEYS[2]  stream: commands
-- KEYS[3]  hash: the proposal (only for a decision)
-- KEYS[4]  stream: notes for the audit (only for a decision, when it is refused here)
-- ARGV[1]  encoded command        ARGV[2] now      ARGV[3] seconds to keep the result
-- ARGV[4]  commands to keep       ARGV[5] 'decide', or '' for the rest, which then ends here
-- ARGV[6]  generation             ARGV[7] revision
-- ARGV[8]  'approved' or 'rejected'
-- ARGV[9]  option ('' = the recommended one)
-- ARGV[10] who                    ARGV[11] reason
-- ARGV[12] run                    ARGV[13] notes to keep
-- ARGV[14] key of the run's snapshot: not among KEYS, whoever submits may only read it
-- Returns duplicate (0 or 1), code, state, who decided, time of the first result, why (see `detail`).
-- storage.live.verdict.judge and detail are the same in Python: change both.
local function judge(proposal)
  if not proposal.state then
    return 'unknown'
  elseif proposal.state == 'expired' or proposal.state == 'stale' then
    return proposal.state
  elseif proposal.state ~= 'open' then
    return 'decided'
  elseif tonumber(ARGV[2]) > tonumber(proposal.expires_at) then
    return 'expired'
  end
  local current = tonumber(redis.call('HGET', ARGV[14], 'generation') or '0')
  if ARGV[6] ~= proposal.generation or ARGV[7] ~= proposal.revision
      or current > tonumber(proposal.generation) then
    return 'stale'
  end
  if ARGV[8] == 'approved' and ((proposal.barred or '') ~= ''
      or string.find(proposal.out or '', '\n' .. ARGV[10] .. '\n', 1, true)) then
    return 'not_allowed'
  end
  local option = tonumber(ARGV[9] ~= '' and ARGV[9] or proposal.recommended)
  if ARGV[8] == 'approved'
      and (option < 0 or string.sub(proposal.feasible, option + 1, option + 1) ~= '1') then
    return 'invalid'
  end
  return 'accepted', option
end

local function detail(proposal, code)
  if code == 'stale' or code == 'expired' then
    if proposal.state == 'open' then
      return proposal.news or ''
    end
    return proposal.state == code and proposal.state_reason or ''
  elseif code == 'not_allowed' then
    return proposal.barred or ''
  elseif code == 'accepted' and ARGV[8] == 'approved' and tonumber(proposal.left or '1') > 1 then
    return proposal.left
  end
  return ''
end

local first = redis.call('HMGET', KEYS[1], 'code', 'state', 'by', 'at', 'why')
if first[1] then
  return {1, first[1], first[2], first[3], first[4], first[5] or ''}
end
local code, state, by, why = 'accepted', '', '', ''
if ARGV[5] == 'decide' then
  local flat = redis.call('HGETALL', KEYS[3])
  local proposal = {}
  for i = 1, #flat, 2 do
    proposal[flat[i]] = flat[i + 1]
  end
  local option
  code, option = judge(proposal)
  state, by = proposal.state or '', proposal.decided_by or ''
  why = detail(proposal, code)
  -- One approval of several leaves the proposal as it is: the controller counts it.
  if code == 'accepted' and why == '' then
    redis.call('HSET', KEYS[3], 'state', ARGV[8], 'decided_by', ARGV[10], 'decided_at', ARGV[2],
      'revision', string.format('%.0f', tonumber(proposal.revision) + 1), 'state_reason', ARGV[11],
      'chosen', ARGV[8] == 'approved' and string.format('%.0f', option) or '')
  end
end
if code == 'accepted' then
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'd', ARGV[1])
else
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[13], '*', 'd', ARGV[1], 'r', ARGV[12], 'c', code)
end
redis.call('HSET', KEYS[1], 'code', code, 'state', state, 'by', by, 'at', ARGV[2], 'why', why)
redis.call('EXPIRE', KEYS[1], ARGV[3])
return {0, code, state, by, ARGV[2], why}
