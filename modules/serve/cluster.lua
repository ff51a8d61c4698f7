--- A cluster that serves a language model, in events instead of machines: requests come, a scheduler of the cluster
-- says which machines compute their prompts and which their tokens, and each machine has its own steps, whose seconds
-- are those of a StepTime. Patel et al. 2023, "Splitwise: Efficient generative LLM inference using phase splitting".
--
-- Machines of the pool "mixed" do both for a request, in steps that have prompts and tokens together: the oldest
-- prompts whole, as many as fit `limit` tokens (Yu et al. 2022, Orca), or with `chunk` so many tokens of a step, parts
-- of prompts among them (Agrawal et al. 2023, SARATHI). Where there are pools "prompt" and "token" a request has a
-- machine of each. Keys and values go from one to the other layer by layer while the prompt is computed, or after it
-- where it is shorter than `serial_below`. Where all prompts' queues are too long, a machine of the pool "token" takes
-- the request as a mixed one would; where those have no room, its machine of the pool "prompt" does.
local arguments = require "tycho.arguments"

local M = {}

--- A machine of a cluster in events.
---@class ClusterMachine
---@field time StepTime
---@field pool "mixed"|"prompt"|"token"

--- Machines, and how requests are spread over them.
---@class ServeCluster
---@field machines ClusterMachine[]
---@field limit? integer   tokens of whole prompts in a step (2048)
---@field chunk? integer   tokens of a step of a machine that mixes; prompts are taken in parts then
---@field overflow? integer  tokens of prompts that wait at a machine, from which on another pool helps (8192)
---@field serial_below? integer  prompts below these go over after they were computed (512)
---@field layers? integer  in which keys and values go over (70)

-- ---- events, the earliest first, of the same time in their order ----

local function push(sim, time, fn, a, b)
  local heap = sim.heap
  local i = #heap + 1
  sim.events = sim.events + 1
  local order = sim.events
  local event = { time, fn, a, b, order }
  while i > 1 do
    local parent = i // 2
    local above = heap[parent][1]
    if above < time or above == time and heap[parent][5] < order then break end
    heap[i] = heap[parent]
    i = parent
  end
  heap[i] = event
end

local function before(a, b) return a[1] < b[1] or a[1] == b[1] and a[5] < b[5] end

local function pop(heap)
  local n, first = #heap, heap[1]
  local last = heap[n]
  heap[n] = nil
  n = n - 1
  if n == 0 then return first end
  local i = 1
  while true do
    local child = 2 * i
    if child > n then break end
    if child < n and before(heap[child + 1], heap[child]) then child = child + 1 end
    if before(last, heap[child]) then break end
    heap[i] = heap[child]
    i = child
  end
  heap[i] = last
  return first
end

-- ---- a machine ----

-- Requests that decode all get a token in every step: when each of them ends is known when it begins, and a step costs
-- the same work here for few as for many.
local function decode_from_now(m, r)
  m.decodes, m.context = m.decodes + 1, m.context + r.prompt + 1
  local ends = m.steps + r.count - 1
  local list = m.ends[ends]
  if list then list[#list + 1] = r else m.ends[ends] = { r } end
end

-- What of the queue goes into a step: tokens, pairs, and the requests whose prompts are then computed.
local function take_prompts(sim, m)
  local sum, pairs_sum, done = 0, 0, {}
  local chunk = m.pool ~= "prompt" and sim.chunk
  local left = chunk and chunk - m.decodes or sim.limit
  while m.first <= m.last and left > 0 do
    local r = m.queue[m.first]
    if not r.admitted then
      local need = r.token_at == m and r.prompt + r.count or r.prompt
      if m.used + need > m.room and m.used > 0 then break end
      r.admitted, m.used = need, m.used + need
    end
    local missing = r.prompt - r.computed
    local n = chunk and math.min(missing, left) or missing
    if not chunk and sum > 0 and n > left then break end
    sum, left, pairs_sum = sum + n, left - n, pairs_sum + n * (r.computed + (n + 1) / 2)
    r.computed = r.computed + n
    if n < missing then break end
    done[#done + 1] = r
    m.queue[m.first] = nil
    m.first = m.first + 1
  end
  return sum, pairs_sum, done
end

local end_step

local function start_step(sim, m, now)
  local taken = 0
  while m.ready_first <= #m.ready do -- those whose keys and values have come, and for which there is room
    local r = m.ready[m.ready_first]
    local need = r.prompt + r.count
    if m.used + need > m.room and m.used > 0 then break end
    m.used, m.ready_first = m.used + need, m.ready_first + 1
    taken = taken + r.prompt
    decode_from_now(m, r)
  end
  local sum, pairs_sum, done = take_prompts(sim, m)
  if sum == 0 and m.decodes == 0 then
    m.busy = false
    return
  end
  m.busy = true
  local seconds = m.time.of(sum, pairs_sum, m.decodes, m.context)
  local time = m.time
  if time.send or time.take then
    local sent = 0
    for _, r in ipairs(done) do
      if r.token_at ~= m and r.count > 1 then sent = sent + r.prompt end
    end
    seconds = seconds + ((time.send or 0) * sent + (time.take or 0) * taken) * time.token_bytes
  end
  m.worked = m.worked + seconds
  push(sim, now + seconds, end_step, m, { sum, done, seconds })
end

local function arrive(sim, m, r, now)
  m.ready[#m.ready + 1] = r
  if not m.busy then start_step(sim, m, now) end
end

-- When what is computed in a step of so many seconds that ends now is on the machine that decodes.
local function send_over(sim, m, r, now, seconds)
  local to = r.token_at
  local bandwidth = math.min(m.time.bandwidth or math.huge, to.time.bandwidth or math.huge)
  local takes = r.prompt * (m.time.token_bytes or 0) / bandwidth
  local first = now
  if r.prompt >= sim.serial_below then first = now - seconds * (1 - 1 / sim.layers) end
  -- Layers go as they are computed; the last one when all are. What was sent before goes first.
  local over = math.max(math.max(first, m.link) + takes, now + takes / (first < now and sim.layers or 1))
  m.link = over
  sim.bytes = sim.bytes + r.prompt * (m.time.token_bytes or 0)
  push(sim, over + (m.time.latency or 0), arrive, to, r)
end

local function finish(m, r, now)
  r.over = now
  m.used, m.reserved = m.used - (r.prompt + r.count), m.reserved - (r.prompt + r.count)
end

function end_step(sim, m, what, now)
  local sum, done, seconds = what[1], what[2], what[3]
  m.steps, m.context = m.steps + 1, m.context + m.decodes
  local ending = m.ends[m.steps]
  if ending then
    m.ends[m.steps] = nil
    for _, r in ipairs(ending) do
      m.decodes, m.context = m.decodes - 1, m.context - (r.prompt + r.count)
      finish(m, r, now)
    end
  end
  m.pending = m.pending - sum
  for _, r in ipairs(done) do
    r.first = now
    if r.token_at == m then
      if r.count == 1 then finish(m, r, now) else decode_from_now(m, r) end
    else
      m.used = m.used - r.admitted
      if r.count == 1 then
        r.over = now
        r.token_at.reserved = r.token_at.reserved - (r.prompt + r.count)
      else
        send_over(sim, m, r, now, seconds)
      end
    end
  end
  start_step(sim, m, now)
end

-- ---- the scheduler of the cluster ----

local function least(list, field)
  local best
  for _, m in ipairs(list) do
    if not best or m[field] + m.decodes < best[field] + best.decodes then best = m end
  end
  return best
end

-- Joins the shortest queue: of prompts by the tokens that wait, of tokens by the room that is reserved.
local function route(sim, r)
  local pools = sim.pools
  if #pools.mixed > 0 then
    r.prompt_at = least(pools.mixed, "pending")
    r.token_at = r.prompt_at
    return
  end
  local prompt, token = least(pools.prompt, "pending"), nil
  for _, m in ipairs(pools.token) do
    if not token or m.reserved < token.reserved then token = m end
  end
  if prompt.pending > 0 and prompt.pending + r.prompt > sim.overflow then
    local other = least(pools.token, "pending")
    if other.pending < prompt.pending then
      prompt, token = other, other
      sim.overflowed = sim.overflowed + 1
    end
  elseif token.reserved + r.prompt + r.count > token.room then
    token = prompt
    sim.overflowed = sim.overflowed + 1
  end
  r.prompt_at, r.token_at = prompt, token
end

local function come(sim, _, r, now)
  if r.place then
    r.prompt_at, r.token_at = sim.machines[r.place[1]], sim.machines[r.place[2]]
  else
    route(sim, r)
  end
  local m = r.prompt_at
  r.token_at.reserved = r.token_at.reserved + r.prompt + r.count
  m.pending = m.pending + r.prompt
  m.last = m.last + 1
  m.queue[m.last] = r
  if not m.busy then start_step(sim, m, now) end
end

--- Serves a trace, to its end. Of each request comes back arrival, prompt, count, first and over (seconds at which its
-- first and last token were there), place (numbers of the two machines).
---@param cluster ServeCluster
---@param trace ServiceArrival[]  where they have a place, they go there
---@return { requests: table[], bytes: number, overflowed: integer, seconds: number, busy: number[] } outcome  bytes
-- that went from machine to machine; overflowed: requests that one machine of two pools had to serve alone; busy: the
-- share of the time in which each machine worked
function M.simulate(cluster, trace)
  local who = "serve.cluster.simulate"
  arguments.expect(who, "cluster", cluster, "a table")
  arguments.expect(who, "cluster.machines", cluster.machines, "a list of tables")
  arguments.expect(who, "trace", trace, "a list of tables")
  local sim = { heap = {}, events = 0, machines = {}, pools = { mixed = {}, prompt = {}, token = {} }, bytes = 0,
    overflowed = 0, chunk = cluster.chunk, limit = cluster.limit or 2048, overflow = cluster.overflow or 8192,
    serial_below = cluster.serial_below or 512, layers = cluster.layers or 70 }
  for i, given in ipairs(cluster.machines) do
    arguments.expect(who, "machine " .. i .. ": pool", given.pool, '"mixed" or "prompt" or "token"')
    local m = { number = i, time = given.time, pool = given.pool, room = given.time.room or math.huge, queue = {},
      first = 1, last = 0, ready = {}, ready_first = 1, ends = {}, steps = 0, decodes = 0, context = 0, used = 0,
      pending = 0, reserved = 0, link = 0, worked = 0, busy = false }
    sim.machines[i] = m
    table.insert(sim.pools[given.pool], m)
  end
  local pools = sim.pools
  local split = #pools.prompt > 0 and #pools.token > 0 and #pools.mixed == 0
  if not split and (#pools.mixed == 0 or #pools.mixed < #sim.machines) then
    arguments.fail("%s: cluster.machines: expected all mixed, or some for prompts and some for tokens, got %d, %d and "
      .. "%d", who, #pools.mixed, #pools.prompt, #pools.token)
  end
  local requests, now = {}, 0
  for i, given in ipairs(trace) do
    local r = { arrival = given.arrival, prompt = given.prompt, count = given.count, computed = 0, place = given.place }
    requests[i] = r
    push(sim, given.arrival, come, nil, r)
  end
  while #sim.heap > 0 do
    local event = pop(sim.heap)
    now = event[1]
    event[2](sim, event[3], event[4], now)
  end
  local busy = {}
  for i, m in ipairs(sim.machines) do busy[i] = m.worked / math.max(now, 1e-12) end
  for _, r in ipairs(requests) do
    r.place = { r.prompt_at.number, r.token_at.number }
    r.prompt_at, r.token_at, r.admitted, r.computed = nil, nil, nil, nil
  end
  return { requests = requests, bytes = sim.bytes, overflowed = sim.overflowed, seconds = now, busy = busy }
end

-- ---- what users see ----

local function at_share(sorted, share)
  return sorted[math.max(1, math.ceil(share * #sorted))]
end

--- Seconds that requests wait: to the first token (ttft), between tokens on average (tbt) and to the last (e2e), and
-- how much longer each is than for the request alone on a machine (slow_ttft and so on): lists of p50, p90 and p99.
---@param requests table[]  with arrival, prompt, count, first and over
---@param alone StepTime
---@return table<string, { p50: number, p90: number, p99: number }>
function M.latencies(requests, alone)
  local who = "serve.cluster.latencies"
  arguments.expect(who, "requests", requests, "a list of tables")
  arguments.expect(who, "alone", alone, "a table")
  local lists = { ttft = {}, tbt = {}, e2e = {}, slow_ttft = {}, slow_tbt = {}, slow_e2e = {} }
  local function put(name, value) lists[name][#lists[name] + 1] = value end
  for _, r in ipairs(requests) do
    local first = alone.of(r.prompt, r.prompt * (r.prompt + 1) / 2, 0, 0)
    local each = alone.of(0, 0, 1, r.prompt + r.count / 2)
    put("ttft", r.first - r.arrival)
    put("slow_ttft", (r.first - r.arrival) / first)
    put("e2e", r.over - r.arrival)
    put("slow_e2e", (r.over - r.arrival) / (first + (r.count - 1) * each))
    if r.count > 1 then
      put("tbt", (r.over - r.first) / (r.count - 1))
      put("slow_tbt", (r.over - r.first) / (r.count - 1) / each)
    end
  end
  local result = {}
  for name, list in pairs(lists) do
    table.sort(list)
    result[name] = { p50 = at_share(list, 0.5), p90 = at_share(list, 0.9), p99 = at_share(list, 0.99) }
  end
  return result
end

--- The paper's service level: how much longer than alone requests may take.
M.service_level = { slow_ttft = { p50 = 2, p90 = 3, p99 = 6 }, slow_tbt = { p50 = 1.25, p90 = 1.5, p99 = 5 },
  slow_e2e = { p50 = 1.25, p90 = 1.5, p99 = 5 } }

--- Whether latencies keep to a service level (that of the paper), and by how much: the largest of what they are of what
-- they may be.
---@param latencies table
---@param level? table
---@return boolean
---@return number worst
---@return string where  the one that is worst: "slow_tbt p90"
function M.keeps(latencies, level)
  arguments.expect("serve.cluster.keeps", "latencies", latencies, "a table")
  arguments.expect("serve.cluster.keeps", "level", level, "a table or nil")
  for _, shares in pairs(level or {}) do
    arguments.expect("serve.cluster.keeps", "an entry of level", shares, "a table")
  end
  local worst, where = 0, ""
  for name, shares in pairs(level or M.service_level) do
    for share, most in pairs(shares) do
      local of = latencies[name] and latencies[name][share] or 0
      if of / most > worst then worst, where = of / most, name .. " " .. share end
    end
  end
  return worst <= 1, worst, where
end

return M
