-- Makes one holder's entries what it says.
-- KEYS: states of shards. ARGV[1]: the holder's id. ARGV[2]: '1' if anything is added.
-- ARGV[i + 2]: what changed in KEYS[i]:
-- confirmed number, new number (8 bytes each), counts of whole, partial and gone pages (2 each),
-- then fields of 8 bytes, those of partial pages with their unit mask behind them.
-- Answers for each shard: {0 applied, 1 applied but others before it are missing, 2 too late;
-- pages that had no room for this holder}.
local VALUE_BYTES_MAX = 64

local id = ARGV[1]
local own = { [id] = true }
local partial_id = string.char(byte(id) + 128) .. sub(id, 2)
local answers = {}

if ARGV[2] == '1' then
  call('HSETNX', KEYS[1], 'b', 1) -- is refused if Redis is full, before anything has changed
else
  only_takes_away(KEYS[1])
end
for i, state in ipairs(KEYS) do
  local packed = ARGV[i + 2]
  local confirmed, number, whole, partial, gone, at = number_at('>I8I8I2I2I2', packed)
  local head = call('HMGET', state, 'b', 'n', id)
  local had = tonumber(head[3] or 0)
  if had >= number then
    answers[i] = { 2, 0 }
  else
    local buckets, pages, crowded = tonumber(head[1] or 1), tonumber(head[2] or 0), 0
    local low, stem = round_of(buckets), state .. ':'
    for row = 1, whole + partial do
      local field, entry = sub(packed, at, at + 7), id
      at = at + 8
      if row > whole then
        entry = partial_id .. sub(packed, at, at + 7)
        at = at + 8
      end
      local bucket = stem .. place(field, buckets, low)
      if call('HSETNX', bucket, field, entry) == 1 then
        pages = pages + 1
      else
        local value = call('HGET', bucket, field)
        if value ~= entry then
          local rest = without(value, own)
          if #rest + #entry > VALUE_BYTES_MAX then
            crowded = crowded + 1
            if rest ~= value then call('HSET', bucket, field, rest) end
          elseif value ~= rest .. entry then
            call('HSET', bucket, field, rest .. entry)
          end
        end
      end
    end
    for _ = 1, gone do
      local field = sub(packed, at, at + 7)
      at = at + 8
      local bucket = stem .. place(field, buckets, low)
      local value = call('HGET', bucket, field)
      if value then
        local rest = value == id and '' or without(value, own)
        if rest == '' then
          pages = pages - call('HDEL', bucket, field)
        elseif rest ~= value then
          call('HSET', bucket, field, rest)
        end
      end
    end
    local fitting = fit(stem, buckets, pages)
    call('HSET', state, 'b', fitting, 'n', pages, id, number)
    answers[i] = { had < confirmed and 1 or 0, crowded }
  end
end
return answers
