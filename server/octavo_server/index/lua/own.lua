-- What one holder has in some buckets. KEYS: states of shards. ARGV[1]: the holder's id. ARGV[2]:
-- how many buckets to read of each shard. ARGV[i + 2]: the first of them in KEYS[i].
-- Answers for each shard {buckets there are, number of the holder's last change, fields of whole
-- pages packed, fields and unit masks of partial ones packed}. Writes nothing.
local id, many = ARGV[1], tonumber(ARGV[2])
local answers = {}
for i, state in ipairs(KEYS) do
  local head = call('HMGET', state, 'b', id)
  local buckets, first = tonumber(head[1] or 1), tonumber(ARGV[i + 2])
  local stem, whole, partial = state .. ':', {}, {}
  for bucket = first, math.min(buckets, first + many) - 1 do
    local all = call('HGETALL', stem .. bucket)
    for row = 1, #all, 2 do
      local field, value, at = all[row], all[row + 1], 1
      while at <= #value do
        local holder, following = entry_at(value, at)
        if holder == id then
          if following == at + 4 then
            whole[#whole + 1] = field
          else
            partial[#partial + 1] = field .. sub(value, at + 4, at + 11)
          end
        end
        at = following
      end
    end
  end
  answers[i] = { buckets, tonumber(head[2] or 0), table.concat(whole), table.concat(partial) }
end
return answers
