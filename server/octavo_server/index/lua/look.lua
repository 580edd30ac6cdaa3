-- What fields say. KEYS: states of shards. ARGV[i]: fields of 8 bytes in KEYS[i].
-- Answers for each shard: a value or nothing for each field. Writes nothing.
local answers = {}
for i, state in ipairs(KEYS) do
  local fields, values = ARGV[i], {}
  local buckets = tonumber(call('HGET', state, 'b') or 1)
  local low, stem = round_of(buckets), state .. ':'
  for at = 1, #fields, 8 do
    local field = sub(fields, at, at + 7)
    values[#values + 1] = call('HGET', stem .. place(field, buckets, low), field)
  end
  answers[i] = values
end
return answers
