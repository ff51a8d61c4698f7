--- Which machines have which stages of a model where machines have networks of several kinds that do not speak to each
-- other, as InfiniBand and RoCE: ranks that sum gradients belong where one fast network joins them, what passes between
-- stages is small enough for the Ethernet that joins all. Yang et al. 2023, "Holmes: Towards Distributed Training
-- Across Clusters with Heterogeneous NIC Environment".
--
--     local machines = dist.placement.machines { nodes = { "infiniband", "roce", "infiniband", "roce" }, ... }
--     local where = dist.placement.by_network(machines, plan)
--     local layers = dist.placement.partition(model, machines, plan, where)
--     print(dist.placement.step(model, machines, plan, where, { layers = layers }).seconds)
--
-- Ranks are those of dist.grid: neighbours share layers, then come those of the same stage, then the stages. Steps are
-- formulas of dist.plans, played through by dist.schedule.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local costs = require "tycho.dist.costs"
local plans = require "tycho.dist.plans"
local schedules = require "tycho.dist.schedule"

local expect, fail = arguments.expect, arguments.fail
local M = {}

--- Machines with networks of several kinds.
---@class PlacementMachines
---@field nodes string[]      the fast network of each machine; machines with another one do not reach it
---@field devices integer     of a machine
---@field networks table<string, { latency: number, bandwidth: number }>  of a machine; "ethernet" joins all
---@field cluster CostCluster  a machine's devices and the links between these, as its first tier
local Machines = {}
Machines.__index = Machines
Machines.__name = "PlacementMachines"

--- Machines and their networks. options: nodes (for each machine its fast network's name, "ethernet" without one),
-- networks ({ name = { latency, bandwidth } }: what a machine sends at most, which its devices divide), cluster (of
-- dist.costs, with the devices of a machine as its first tier).
---@param options { nodes: string[], networks: table, cluster: CostCluster }
---@return PlacementMachines
function M.machines(options)
  local who, none = "dist.placement.machines", arguments.none
  local o = arguments.read(who, options, { nodes = none, networks = none, cluster = none },
    { nodes = "a list of strings", networks = "a table", cluster = "a table" })
  for _, name in ipairs { "nodes", "networks", "cluster" } do
    if o[name] == nil then fail("%s: %s: expected a value, got nil", who, name) end
  end
  costs.expect_cluster(who, o.cluster)
  o.devices = o.cluster.tiers[1].size
  if not o.devices then fail("%s: cluster: expected a first tier of a machine's devices", who) end
  if #o.nodes == 0 then fail("%s: nodes: expected at least one, got none", who) end
  expect(who, "networks.ethernet", o.networks.ethernet, "a table")
  for name, network in pairs(o.networks) do
    expect(who, ("networks.%s.latency"):format(name), network.latency, "a finite number >= 0")
    expect(who, ("networks.%s.bandwidth"):format(name), network.bandwidth, "a number > 0")
  end
  for i, name in ipairs(o.nodes) do
    if not o.networks[name] then fail("%s: nodes[%d]: expected one of the networks, got %s", who, i, name) end
  end
  return setmetatable(o, Machines)
end

local function check_machines(who, machines)
  if getmetatable(machines) ~= Machines then
    fail("%s: machines: expected some of dist.placement.machines, got %s", who, arguments.describe(machines))
  end
end

--- The network by which devices exchange: the one inside where they are on one machine; else the fast one that all of
-- their machines have, or Ethernet.
---@param devices integer[]  from 0; machine n has the n-th `devices` of them
---@return string name  "inside" for that of a machine
function Machines:network(devices)
  check_machines("PlacementMachines:network", self)
  expect("PlacementMachines:network", "devices", devices, "a list of integers >= 0")
  local first, name, same = nil, nil, true
  for _, device in ipairs(devices) do
    local node = device // self.devices
    local has = self.nodes[node + 1]
    if not has then fail("PlacementMachines:network: devices: expected less than %d, got %d",
      #self.nodes * self.devices, device) end
    if not first then first, name = node, has end
    same = same and node == first
    if has ~= name then name = "ethernet" end
  end
  return same and "inside" or name
end

-- The link of a ring of devices, when all devices are in such rings; `network`: the one to use.
local function link_of(self, devices, network)
  if network == "inside" then
    local tier = self.cluster.tiers[1]
    return { latency = tier.latency, bandwidth = tier.bandwidth }
  end
  local inside, least = {}, math.huge
  for _, device in ipairs(devices) do
    local node = device // self.devices
    inside[node] = (inside[node] or 0) + 1
  end
  for _, n in pairs(inside) do least = math.min(least, n) end
  local link = self.networks[network]
  return { latency = link.latency, bandwidth = link.bandwidth * least / self.devices }
end

-- ---- where ranks are ----

local function sizes_of(who, machines, plan)
  check_machines(who, machines)
  expect(who, "plan", plan, "a table")
  local t, p, d = plan.tensor or 1, plan.pipeline or 1, plan.data or 1
  for name, value in pairs { tensor = t, pipeline = p, data = d } do expect(who, name, value, "an integer >= 1") end
  local all = #machines.nodes * machines.devices
  if t * p * d ~= all then
    fail("%s: plan: expected tensor * pipeline * data of %d, the devices, got %d * %d * %d", who, all, t, p, d)
  end
  if machines.devices % t ~= 0 then
    fail("%s: plan: tensor: expected a divisor of the %d devices of a machine, got %d", who, machines.devices, t)
  end
  return t, p, d
end

-- Devices by rank, from machines one after the other.
local function fill(machines, order)
  local list = {}
  for _, node in ipairs(order) do
    for device = 0, machines.devices - 1 do list[#list + 1] = (node - 1) * machines.devices + device end
  end
  return list
end

--- Machines one after the other, as they are listed: what a framework does that does not look at networks.
---@param machines PlacementMachines
---@param plan ParallelPlan
---@return integer[] devices  by rank, from 1 on
function M.in_order(machines, plan)
  sizes_of("dist.placement.in_order", machines, plan)
  local order = {}
  for i = 1, #machines.nodes do order[i] = i end
  return fill(machines, order)
end

--- A placement by chance: machines in any order, or groups of ranks that share layers in any order.
---@param machines PlacementMachines
---@param plan ParallelPlan
---@param seed integer
---@param unit? string  "machine" or "group" ("machine")
---@return integer[] devices  by rank, from 1 on
function M.random(machines, plan, seed, unit)
  local who = "dist.placement.random"
  local t = sizes_of(who, machines, plan)
  expect(who, "seed", seed, "an integer")
  expect(who, "unit", unit, '"machine" or "group" or nil')
  local size = unit == "group" and t or machines.devices
  local count = #machines.nodes * machines.devices // size
  local before = ty.rng_state()
  ty.manual_seed(seed)
  local order, list = ty.randperm(count):tolist(), {}
  ty.rng_state(before)
  for _, block in ipairs(order) do
    for i = 0, size - 1 do list[#list + 1] = block * size + i end
  end
  return list
end

--- Machines by their networks: as many whole stages on machines of one network as can be, and stages of one network
-- behind one another, the fastest first: the last stage is the first to be done with its micro-batches, and has time to
-- sum its gradients while the others end. What is left over of several networks shares stages behind them.
---@param machines PlacementMachines
---@param plan ParallelPlan
---@return integer[] devices  by rank, from 1 on
function M.by_network(machines, plan)
  local _, p = sizes_of("dist.placement.by_network", machines, plan)
  local of, names = {}, {}
  for i, name in ipairs(machines.nodes) do
    if not of[name] then
      of[name] = {}
      names[#names + 1] = name
    end
    table.insert(of[name], i)
  end
  table.sort(names, function(a, b)
    local fast, slow = machines.networks[a].bandwidth, machines.networks[b].bandwidth
    if fast ~= slow then return fast > slow end
    return a < b
  end)
  local stage, order, left = math.max(1, #machines.nodes // p), {}, {}
  for _, name in ipairs(names) do
    local whole = #of[name] // stage * stage
    for i, node in ipairs(of[name]) do
      -- Those of Ethernet alone are no slower among others.
      table.insert(i <= whole and name ~= "ethernet" and order or left, node)
    end
  end
  return fill(machines, table.move(left, 1, #left, #order + 1, order))
end

-- ---- what a step takes ----

local function devices_of(placement, ranks)
  local list = {}
  for i, rank in ipairs(ranks) do list[i] = placement[rank + 1] end
  table.sort(list)
  return list
end

-- Seconds of a stage's gradients and of its new weights on their way, and its messages to the next stage.
local function exchanges(model, machines, o, placement, stage, layers, common)
  local t, d, p = o.tensor, o.data, o.pipeline
  local n = layers * model:layer_parameters() + ((stage == 1 or stage == p) and model.vocabulary * model.hidden or 0)
  n = n / t
  local sums, gathers, message, networks = 0, 0, 0, {}
  local function choose(devices)
    local name = machines:network(devices)
    if common and name ~= "inside" then name = common end
    networks[name] = (networks[name] or 0) + 1
    return link_of(machines, devices, name)
  end
  for tensor = 0, t - 1 do
    local ranks = {}
    for data = 0, d - 1 do ranks[data + 1] = ((stage - 1) * d + data) * t + tensor end
    if d > 1 then
      local link = choose(devices_of(placement, ranks))
      sums = math.max(sums, costs.seconds("reduce_scatter", d, o.gradient_bytes * n, link))
      gathers = math.max(gathers, costs.seconds("all_gather", d, 2 * n, link))
    end
    if stage < p then
      local bytes = 2.0 * o.micro * model.length * model.hidden / (o.share and t or 1)
      for _, rank in ipairs(ranks) do
        message = math.max(message, costs.message(bytes, choose(devices_of(placement, { rank, rank + t * d }))))
      end
    end
  end
  return sums, gathers, message, networks
end

-- The network that all machines have.
local function common_network(machines)
  local name = machines.nodes[1]
  for _, other in ipairs(machines.nodes) do if other ~= name then return "ethernet" end end
  return name
end

--- What a step takes where ranks are placed: seconds; flops, operations a second of each device; sync, seconds of each
-- stage's gradients; message, seconds to each next stage; rows, events of the stages; networks, by stage how many
-- groups and pairs use which. options: layers (of each stage), choice ("group": each group uses the fastest network
-- that its machines share, "job": all use the one that all machines share), overlap (false: true where gradients are
-- summed while the last micro-batch goes back, and new weights gathered while the next step's first goes forwards).
---@param model CostTransformer
---@param machines PlacementMachines
---@param plan ParallelPlan
---@param placement integer[]
---@param options? { layers?: integer[], choice?: string, overlap?: boolean }
---@return { seconds: number, flops: number, layers: integer[], sync: number[], message: number[], rows: table[][],
---  networks: table[] }
function M.step(model, machines, plan, placement, options)
  local who = "dist.placement.step"
  local t, p, d = sizes_of(who, machines, plan)
  costs.expect(who, model)
  expect(who, "placement", placement, "a list of integers >= 0")
  if #placement ~= t * p * d then
    fail("%s: placement: expected a device for each of %d ranks, got %d", who, t * p * d, #placement)
  end
  local o = arguments.read(who, options, { layers = arguments.none, choice = "group", overlap = false },
    { layers = "a list of integers >= 0", choice = '"group" or "job"', overlap = "a boolean" })
  local of = plans.layer(model, machines.cluster, plan)
  local layers = o.layers or of.stages
  local sum = 0
  for _, n in ipairs(layers) do sum = sum + n end
  if #layers ~= p or sum ~= model.layers then
    fail("%s: layers: expected %d layers in %d stages, got %d in %d", who, model.layers, p, sum, #layers)
  end
  local common = o.choice == "job" and common_network(machines) or nil
  local out = { layers = layers, sync = {}, message = {}, networks = {}, seconds = 0 }
  local forward, backward = {}, {}
  for i = 1, p do
    forward[i] = layers[i] * of.forward + (i == p and of.head_forward or 0)
    backward[i] = layers[i] * of.backward + (i == p and of.head_backward or 0)
    local sums, gathers, message, networks = exchanges(model, machines, of.plan, placement, i, layers[i], common)
    out.message[i], out.networks[i] = message, networks
    out.sync[i] = o.overlap and math.max(0, sums - backward[i]) + math.max(0, gathers - forward[i]) or sums + gathers
  end
  local run = schedules.simulate(schedules.one_f_one_b(p, of.micro_batches),
    { forward = forward, backward = backward, message = out.message })
  out.rows = run.rows
  for i = 1, p do
    local events = run.rows[i]
    local last = events[#events].to
    events[#events + 1] = { name = "update", from = last, to = last + out.sync[i] }
    out.seconds = math.max(out.seconds, last + out.sync[i])
  end
  out.flops = model:flops(of.plan.sequences, of.plan.recompute) / out.seconds / #placement
  return out
end

--- Layers of the stages: as many as the stage's machines are fast, where what gradients take counts as time of a layer,
-- and then one layer moved at a time while a step becomes shorter.
---@param model CostTransformer
---@param machines PlacementMachines
---@param plan ParallelPlan
---@param placement integer[]
---@param options? { choice?: string, overlap?: boolean }  as step() has them
---@return integer[] layers  by stage
function M.partition(model, machines, plan, placement, options)
  local who = "dist.placement.partition"
  local _, p = sizes_of(who, machines, plan)
  local o = arguments.read(who, options, { choice = "group", overlap = false },
    { choice = '"group" or "job"', overlap = "a boolean" })
  local even = M.step(model, machines, plan, placement, o)
  local of = plans.layer(model, machines.cluster, plan)
  local speed, all, layers, left = {}, 0, {}, model.layers
  for i = 1, p do
    local head = i == p and of.head_forward + of.head_backward or 0
    local busy = of.micro_batches * (even.layers[i] * (of.forward + of.backward) + head) + even.sync[i]
    speed[i] = even.layers[i] / busy
    all = all + speed[i]
  end
  for i = 1, p do
    local share = math.floor(model.layers * speed[i] / all + 0.5)
    layers[i] = i == p and left or math.min(left - (p - i), math.max(1, share))
    left = left - layers[i]
  end
  local function take(list)
    o.layers = list
    return M.step(model, machines, plan, placement, o).seconds
  end
  local best = take(layers)
  if even.seconds < best then best, layers = even.seconds, table.move(even.layers, 1, p, 1, {}) end
  local better = true
  while better do
    better = false
    for from = 1, p do
      for to = 1, p do
        if from ~= to and layers[from] > 1 then
          layers[from], layers[to] = layers[from] - 1, layers[to] + 1
          local seconds = take(layers)
          if seconds < best * (1 - 1e-9) then best, better = seconds, true
          else layers[from], layers[to] = layers[from] + 1, layers[to] - 1 end
        end
      end
    end
  end
  return layers
end

return M
