-- What one holder has in some buckets. KEYS: the state of one shard. ARGV: the holder's id, the
-- first bucket, how many. Answers {buckets there are, number of the holder's last change, fields
-- of whole pages packed, fields and unit masks of partial ones packed}. Writes nothing.
local state, id = KEYS[1], ARGV[1]
local head = call('HMGET', state, 'b', id)
local buckets = tonumber(head[1] or 1)
local stem, whole, partial = state .. ':', {}, {}
for bucket = tonumber(ARGV[2]), math.min(buckets, ARGV[2] + ARGV[3]) - 1 do
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
return { buckets, tonumber(head[2] or 0), table.concat(whole), table.concat(partial) }
