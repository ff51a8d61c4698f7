--- Loading universal checkpoints by ranks of any number and arrangement, straight from what others have saved: each
-- byte is read once, by one of the ranks that want it, which passes it on to the others. Wan et al. 2024,
-- "ByteCheckpoint: A Unified Checkpointing System for Large Foundation Model Development".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local files = require "tycho.dist.universal_files"
local folders = require "tycho.folders"
local Group = require "tycho.dist.group"
local parts_of = require "tycho.dist.universal_parts"
local plans = require "tycho.dist.universal_plan"
local regions = require "tycho.dist.universal_regions"
local shipped = require "tycho.shipped"
local texts = require "tycho.dist.texts"

local expect, fail = arguments.expect, arguments.fail
local TAG = 2160 -- of messages with what was read

--- A checkpoint from which ranks read together.
---@class UniversalReader
---@field values table<string, string|number|boolean>
---@field names string[]
---@field bytes integer   that this rank has read of tensors
---@field passed integer  that it has sent to others
---@field wanted integer  that it has been asked for
local Reader = {}
Reader.__index = Reader
Reader.__name = "UniversalReader"

local function label_of(name, slot) return ("%s of %s"):format(slot, name) end

-- Runs of pieces by name and slot, in the order of parts; what two ranks have saved counts once.
local function arrange(who, entries)
  local all, names = {}, {}
  for _, e in ipairs(entries) do
    local of = all[e.name]
    if not of then
      of = { slots = {}, order = {} }
      all[e.name], names[#names + 1] = of, e.name
    end
    if not of.slots[e.slot] then of.slots[e.slot], of.order[#of.order + 1] = {}, e.slot end
    table.insert(of.slots[e.slot], e)
  end
  table.sort(names)
  for _, name in ipairs(names) do
    table.sort(all[name].order)
    for slot, list in pairs(all[name].slots) do
      local first, kept, at, reached = list[1], {}, nil, 0
      -- Of what is the same everywhere, whatever rank has saved it.
      if first.part.kind == "replicated" then for _, e in ipairs(list) do e.part.index = 0 end end
      table.sort(list, function(a, b)
        if a.part.index ~= b.part.index then return a.part.index < b.part.index end
        if a.begin ~= b.begin then return a.begin < b.begin end
        if a.count ~= b.count then return a.count > b.count end
        return a.rank < b.rank
      end)
      for _, e in ipairs(list) do
        local differs = parts_of.differ(first.part, e.part) or first.dtype ~= e.dtype and "dtype"
        if differs then fail("%s: ranks differ about %s: %s", who, label_of(name, slot), differs) end
        if at ~= e.part.index then at, reached = e.part.index, 0 end
        if e.begin + e.count > reached then
          e.skip = math.max(0, reached - e.begin)
          e.boxes = regions.boxes(e.part, e.begin + e.skip, e.count - e.skip)
          reached = e.begin + e.count
          kept[#kept + 1] = e
        end
      end
      all[name].slots[slot] = kept
    end
  end
  return all, names
end

--- Opens what ranks have saved, of whatever number and arrangement. All ranks of the group call it; only rank 0 reads
-- what there is, and says it to the others.
---@param group RankGroup
---@param path string
---@return UniversalReader
local function open(group, path)
  local who = "dist.universal.load"
  Group.expect(who, group)
  expect(who, "path", path, "a string")
  local said
  if group.rank == 0 then
    local folder = folders.find(path, "state.json")
    if not folder then fail("%s: there is no checkpoint at %s", who, path) end
    shipped.verify(who, folder, { required = true, only = "state.json" })
    local ranks, values = files.read_state(who, folder)
    local lists = {}
    for rank = 0, ranks - 1 do
      shipped.verify(who, folder, { required = true, only = files.rank_name(rank) .. ".json" })
      lists[rank + 1] = files.read_list(who, folder, rank)
    end
    said = ty.io.json_encode { folder = folder, values = values, lists = ty.core.io.array(lists) }
  end
  local all = ty.io.json_decode(texts.broadcast(group, said or ""), { values = 10000000 })
  local entries = {}
  for rank, list in ipairs(all.lists) do
    for i, entry in ipairs(list) do entries[#entries + 1] = files.check_entry(who, rank - 1, i, entry) end
  end
  for i, e in ipairs(entries) do e.id = ("%08d"):format(i) end
  local self = setmetatable({ group = group, folder = all.folder, values = {}, bytes = 0, passed = 0, wanted = 0 },
    Reader)
  for key, value in pairs(all.values) do self.values[key] = value end
  self.all, self.names = arrange(who, entries)
  return self
end

--- The slots of a parameter: "weight" and what an optimizer keeps. nil where there is no such parameter.
---@param name string
---@return string[]?
function Reader:slots(name)
  expect("UniversalReader:slots", "name", name, "a string")
  local of = self.all[name]
  return of and table.move(of.order, 1, #of.order, 1, {})
end

--- The shape of a whole parameter. nil where there is none.
---@param name string
---@return integer[]?
function Reader:shape(name)
  expect("UniversalReader:shape", "name", name, "a string")
  local of = self.all[name]
  return of and parts_of.shape_of(of.slots[of.order[1]][1].part)
end

-- ---- who wants what ----

local function check_wanted(who, wanted)
  for i, w in ipairs(wanted) do
    local at = ("%s: wanted %d"):format(who, i)
    expect(at, "name", w.name, "a string")
    expect(at, "slot", w.slot, "a string")
    parts_of.check_part(at, w.part)
    expect(at, "begin", w.begin, "an integer >= 0 or nil")
    expect(at, "count", w.count, "an integer >= 0 or nil")
    local n = parts_of.elements(w.part.own)
    if (w.begin or 0) + (w.count or 0) > n then
      fail("%s: expected at most the %d elements of the part, got %d from %d on", at, n, w.count, w.begin or 0)
    end
  end
end

-- The wishes of all ranks, by rank from 1 on.
local function wishes_of_all(self, wanted)
  local list = ty.core.io.array {}
  for i, w in ipairs(wanted) do
    list[i] = { name = w.name, slot = w.slot, part = parts_of.plain(w.part), begin = w.begin or 0,
      count = w.count or parts_of.elements(w.part.own) - (w.begin or 0) }
  end
  local all = {}
  for rank, text in ipairs(texts.gather(self.group, ty.io.json_encode(list))) do
    all[rank] = ty.io.json_decode(text, { values = 10000000 })
    for _, w in ipairs(all[rank]) do w.part = parts_of.read_part(w.part) end
  end
  return all
end

-- Where a wish meets what was saved: lists of meetings by the run's id. Raises where it is not all there.
local function meetings(self, who, w)
  local of = self.all[w.name]
  if not of then fail("%s: the checkpoint has no '%s'", who, w.name) end
  local runs = of.slots[w.slot]
  if not runs then fail("%s: the checkpoint has no %s of '%s'", who, w.slot, w.name) end
  local have, shape = table.concat(runs[1].part.shape, ", "), table.concat(w.part.shape, ", ")
  if have ~= shape then
    fail("%s: %s has shape [%s] in the checkpoint, expected [%s]", who, w.name, have, shape)
  end
  w.dtype, w.boxes = runs[1].dtype, regions.boxes(w.part, w.begin, w.count)
  local found, came, by_part, parts = {}, 0, {}, 0
  for _, run in ipairs(runs) do
    local list = regions.meet(run.boxes, w.boxes)
    if #list > 0 then
      found[#found + 1] = { run = run, list = list }
      for _, m in ipairs(list) do came = came + m.count end
    end
    if not by_part[run.part.index] then by_part[run.part.index], parts = true, parts + 1 end
  end
  w.copies = runs[1].part.kind == "averaged" and parts or 1
  local wants = regions.count(w.boxes) * w.copies
  if came ~= wants then
    fail("%s: %s lacks %d of the %d elements that are wanted", who, label_of(w.name, w.slot), wants - came, wants)
  end
  return found
end

-- ---- reading ----

--- Reads what this rank wants, each { name, slot, part, begin, count }: the elements of a part, laid flat, `count` from
-- `begin` on; without these all of it, in its shape. All ranks call it, each with its own list.
---@param wanted { name: string, slot: string, part: UniversalPart, begin?: integer, count?: integer }[]
---@return Tensor[]  in the order of the list
function Reader:read(wanted)
  local who = "UniversalReader:read"
  if getmetatable(self) ~= Reader then fail("%s: expected a reader, got %s", who, arguments.describe(self)) end
  expect(who, "wanted", wanted, "a list of tables")
  check_wanted(who, wanted)
  local group, me = self.group, self.group.rank + 1
  local all = wishes_of_all(self, wanted)
  local items, by_id = {}, {}
  for rank, list in ipairs(all) do
    for number, w in ipairs(list) do
      for _, found in ipairs(meetings(self, who, w)) do
        local id = found.run.id
        local item = by_id[id]
        if not item then
          item = { id = id, bytes = found.run.bytes, run = found.run, ranks = {}, of = {} }
          by_id[id], items[#items + 1] = item, item
        end
        if not item.of[rank] then item.of[rank] = {}; table.insert(item.ranks, rank) end
        table.insert(item.of[rank], { number = number, list = found.list })
      end
    end
  end
  local to = plans.assign(items, group.size)
  -- In the order of parts, which is that in which means are summed.
  table.sort(items, function(a, b)
    local x, y = a.run, b.run
    if x.name ~= y.name then return x.name < y.name end
    if x.slot ~= y.slot then return x.slot < y.slot end
    if x.part.index ~= y.part.index then return x.part.index < y.part.index end
    return x.begin < y.begin
  end)
  local results = {}
  for i, w in ipairs(all[me]) do results[i] = ty.zeros({ w.count }, { dtype = w.dtype }) end

  -- Puts values, which come one after the other, where they belong.
  local function put(item, value_of)
    for _, part in ipairs(item.of[me]) do
      local flat, copies = results[part.number], all[me][part.number].copies
      for _, m in ipairs(part.list) do
        local place, value = regions.view(flat, m[2], m.low, m.size), value_of(m)
        if copies > 1 then place:add_(value) else place:copy_(value) end
      end
    end
  end

  local mine = {}
  ty.no_grad(function()
    for _, item in ipairs(items) do -- what was read first is on its way while the next is read
      if to[item.id] == me then
        local x = files.read_entry(who, self.folder, item.run)
        self.bytes = self.bytes + item.run.bytes
        if item.run.skip > 0 then x = x:narrow(0, item.run.skip, item.run.count - item.run.skip) end
        if item.of[me] then mine[item.id] = ty.keep(x) end
        for _, rank in ipairs(item.ranks) do
          if rank ~= me then
            local list = {}
            for _, part in ipairs(item.of[rank]) do
              for _, m in ipairs(part.list) do list[#list + 1] = regions.view(x, m[1], m.low, m.size):reshape(-1) end
            end
            local message = #list == 1 and list[1] or ty.concat(list, 0)
            self.passed = self.passed + message:nbytes()
            group:send(message, rank - 1, TAG)
          end
        end
      end
    end
    for _, item in ipairs(items) do
      if item.of[me] then
        local own = mine[item.id]
        if own then
          put(item, function(m) return regions.view(own, m[1], m.low, m.size) end)
          own:free()
        else
          local message, at = group:receive(to[item.id] - 1, TAG), 0
          put(item, function(m)
            local value = message:narrow(0, at, m.count):view(m.size)
            at = at + m.count
            return value
          end)
        end
      end
    end
  end)
  for i, w in ipairs(all[me]) do
    self.wanted = self.wanted + w.copies * results[i]:nbytes()
    if w.copies > 1 then results[i] = results[i] / w.copies end
    if not wanted[i].begin and not wanted[i].count then results[i] = results[i]:view(w.part.own) end
  end
  return results
end

return open
