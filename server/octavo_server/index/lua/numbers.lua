-- KEYS: states of shards. ARGV[1]: a holder's id.
-- Answers the number of its last change in each shard. Writes nothing.
local answers = {}
for i, state in ipairs(KEYS) do
  answers[i] = tonumber(redis.call('HGET', state, ARGV[1]) or 0)
end
return answers
