-- Takes retired holders out of some fields. KEYS: states of shards. ARGV[1]: ids, packed.
-- ARGV[i + 1]: fields of 8 bytes in KEYS[i]. Answers for each shard how many entries went.
local unwanted = id_set(ARGV[1])
local answers = {}
only_takes_away(KEYS[1])
for i, state in ipairs(KEYS) do
  local fields, taken = ARGV[i + 1], 0
  local head = call('HMGET', state, 'b', 'n')
  local buckets, pages = tonumber(head[1] or 1), tonumber(head[2] or 0)
  local low, stem = round_of(buckets), state .. ':'
  for at = 1, #fields, 8 do
    local field = sub(fields, at, at + 7)
    local bucket = stem .. place(field, buckets, low)
    local value = call('HGET', bucket, field)
    if value then
      local rest, removed = without(value, unwanted)
      taken = taken + removed
      if rest == '' then
        pages = pages - call('HDEL', bucket, field)
      elseif removed > 0 then
        call('HSET', bucket, field, rest)
      end
    end
  end
  if taken > 0 then call('HSET', state, 'n', pages) end
  answers[i] = taken
end
return answers
