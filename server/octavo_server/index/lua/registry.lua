-- Holders of a cluster. KEYS: records (hash, by id), names (hash, by name: id and incarnation),
-- leases (sorted by when they end), ends (sorted by when a lapsed holder is retired), retired
-- (set of ids). ARGV[1] says what to do. Times are Redis' own, in milliseconds.
local call = redis.call
local records, names, leases, ends, retired = unpack(KEYS)
local clock = call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function start_lease(id, lease, keep)
  call('ZADD', leases, now + lease, id)
  call('ZADD', ends, now + lease + keep, id)
end

local function retire(id)
  local record = call('HGET', records, id)
  call('ZREM', leases, id)
  call('ZREM', ends, id)
  if record then
    call('SADD', retired, id)
    call('HDEL', records, id)
    local holder = cjson.decode(record)
    local name = holder.node_id .. '\n' .. holder.store
    if string.sub(call('HGET', names, name) or '', 1, 4) == id then call('HDEL', names, name) end
  end
end

local acts = {}

-- When a holder began, by its own record; nothing if there is no such holder.
local function began(id)
  local record = call('HGET', records, id)
  return record and cjson.decode(record).started_ms
end

-- name, incarnation, record, lease, keep, most holders, candidates...
-- -> id (four bytes), 'superseded' (a later incarnation's lease runs) or 'full!'
function acts.register(name, incarnation, record, lease, keep, most, ...)
  local current = call('HGET', names, name)
  local id = current and string.sub(current, 1, 4)
  if current and string.sub(current, 5) == incarnation and call('HEXISTS', records, id) == 1 then
    call('HSET', records, id, record)
    start_lease(id, lease, keep)
    return id
  end
  if id then
    local lease_end = tonumber(call('ZSCORE', leases, id) or 0)
    local other_began = began(id)
    if other_began and lease_end > now and other_began > cjson.decode(record).started_ms then
      return 'superseded'
    end
    retire(id)
  end
  if call('HLEN', records) >= tonumber(most) then return 'full!' end
  for _, candidate in ipairs({ ... }) do
    if call('HEXISTS', records, candidate) == 0 and call('SISMEMBER', retired, candidate) == 0 then
      call('HSET', records, candidate, record)
      call('HSET', names, name, candidate .. incarnation)
      start_lease(candidate, lease, keep)
      return candidate
    end
  end
  return 'full!'
end

-- id, name, when it began, lease, keep -> 'renewed', 'forgotten' or 'superseded'
function acts.renew(id, name, started, lease, keep)
  if call('HEXISTS', records, id) == 1 then
    start_lease(id, lease, keep)
    return 'renewed'
  end
  -- An earlier incarnation can go by the name in an old snapshot; it does not count.
  local other_began = began(string.sub(call('HGET', names, name) or '', 1, 4))
  return other_began and other_began > tonumber(started) and 'superseded' or 'forgotten'
end

-- id
function acts.retire(id)
  retire(id)
  return 1
end

-- -> now, {id, end of lease, ...}, {id, record, ...}, {retired id, ...}
function acts.view()
  return { now, call('ZRANGE', leases, 0, -1, 'WITHSCORES'), call('HGETALL', records),
    call('SMEMBERS', retired) }
end

-- Retires who lapsed for good -> how many
function acts.retire_lapsed()
  local gone = call('ZRANGEBYSCORE', ends, '-inf', now)
  for _, id in ipairs(gone) do retire(id) end
  return #gone
end

-- ids...
function acts.bury(...)
  for _, id in ipairs({ ... }) do call('SREM', retired, id) end
  return 1
end

return acts[ARGV[1]](unpack(ARGV, 2))
