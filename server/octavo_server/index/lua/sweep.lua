-- Takes retired holders out of some buckets. KEYS: the state of one shard. ARGV: ids, packed; the
-- first bucket; how many. Answers {buckets there are, ids met that stay, packed}.
-- It never merges buckets: a field would move to where this sweep has been.
local state, unwanted = KEYS[1], id_set(ARGV[1])
if #ARGV[1] > 0 then only_takes_away(state) end
local head = call('HMGET', state, 'b', 'n')
local buckets, pages = tonumber(head[1] or 1), tonumber(head[2] or 0)
local stem, met, before = state .. ':', {}, pages
for bucket = tonumber(ARGV[2]), math.min(buckets, ARGV[2] + ARGV[3]) - 1 do
  local key = stem .. bucket
  local all = call('HGETALL', key)
  for row = 1, #all, 2 do
    local value, at, removed = all[row + 1], 1, false
    while at <= #value do
      local id, following = entry_at(value, at)
      if unwanted[id] then removed = true else met[id] = true end
      at = following
    end
    if removed then
      local rest = without(value, unwanted)
      if rest == '' then
        pages = pages - call('HDEL', key, all[row])
      else
        call('HSET', key, all[row], rest)
      end
    end
  end
end
if pages ~= before then call('HSET', state, 'n', pages) end
local ids = {}
for id in pairs(met) do ids[#ids + 1] = id end
if #ARGV[1] > 0 and tonumber(ARGV[2]) == 0 then
  for id in pairs(unwanted) do call('HDEL', state, id) end
end
return { buckets, table.concat(ids) }
