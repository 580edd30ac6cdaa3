-- A shard is a linear hash table whose buckets are hashes. Its state has the number of buckets
-- ('b'), the number of pages ('n') and, under each holder's id, the number of that holder's last
-- change. A page's place follows from the first four bytes of its field and from 'b', so a field
-- can move without anybody asking for its key. 40 pages a bucket on average are at most 80 in one
-- that is yet to be split, and 128 (hash-max-listpack-entries) lie five deviations above that.
local PAGES_PER_BUCKET = 40
local SPARSE_PAGES_PER_BUCKET = 12

local call = redis.call
local sub, byte = string.sub, string.byte
local number_at = struct.unpack

-- The largest power of two that is at most `buckets`.
local function round_of(buckets)
  local low = 1
  while low * 2 <= buckets do low = low * 2 end
  return low
end

local function place(field, buckets, low)
  local hash = number_at('>I4', field)
  local bucket = hash % (2 * low)
  if bucket < buckets then return bucket end
  return hash % low
end

-- Brings one more bucket into being: it takes its share of one bucket's fields.
local function split(stem, buckets, low)
  local from, to = stem .. (buckets - low), stem .. buckets
  local all = call('HGETALL', from)
  local moved, gone = {}, {}
  for at = 1, #all, 2 do
    if number_at('>I4', all[at]) % (2 * low) == buckets then
      moved[#moved + 1] = all[at]
      moved[#moved + 1] = all[at + 1]
      gone[#gone + 1] = all[at]
    end
  end
  -- Whatever lies there is left from a state that was lost, and its pages are not counted.
  call('DEL', to)
  if #gone > 0 then
    call('HSET', to, unpack(moved))
    call('HDEL', from, unpack(gone))
  end
end

-- The last bucket's fields go back to where they came from.
local function merge(stem, buckets)
  local last = buckets - 1
  local from, to = stem .. last, stem .. (last - round_of(last))
  local all = call('HGETALL', from)
  if #all > 0 then
    call('HSET', to, unpack(all))
    call('DEL', from)
  end
end

-- The number of buckets after as many splits or merges as `pages` ask for.
local function fit(stem, buckets, pages)
  while pages > PAGES_PER_BUCKET * buckets do
    split(stem, buckets, round_of(buckets))
    buckets = buckets + 1
  end
  while buckets > 1 and pages < SPARSE_PAGES_PER_BUCKET * buckets do
    merge(stem, buckets)
    buckets = buckets - 1
  end
  return buckets
end

-- The entry that begins at `at`: its holder's id, and where the next one begins.
local function entry_at(value, at)
  local first = byte(value, at)
  if first < 128 then return sub(value, at, at + 3), at + 4 end
  return string.char(first - 128) .. sub(value, at + 1, at + 3), at + 12
end

-- `value` without the entries whose holder `unwanted` has; how many were left out.
local function without(value, unwanted)
  local kept, removed, at = {}, 0, 1
  while at <= #value do
    local id, following = entry_at(value, at)
    if unwanted[id] then
      removed = removed + 1
    else
      kept[#kept + 1] = sub(value, at, following - 1)
    end
    at = following
  end
  return table.concat(kept), removed
end

-- Four-byte ids, packed, as a set.
local function id_set(packed)
  local set = {}
  for at = 1, #packed, 4 do set[sub(packed, at, at + 3)] = true end
  return set
end

-- The first write of a script that only takes away. Redis that is full refuses a first write that
-- could need room, even of a shorter value, and none after the first.
local function only_takes_away(state) call('HDEL', state, '') end
