--- Saving universal checkpoints while training goes on. Wan et al. 2024, "ByteCheckpoint: A Unified Checkpointing
-- System for Large Foundation Model Development".
--
-- save() copies what the rank is to write into buffers and returns; a thread of each rank writes them. What several
-- ranks have is written by one of them, so that all write as much as can be. The thread of rank 0 waits until all have
-- written, and then lets the new checkpoint take the place of the old one.
--
--     local saver <close> = dist.universal.saver(group)
--     for step = 1, steps do
--       train(step)
--       if step % 100 == 0 then saver:save(path, pieces, { step = step }) end
--     end
local ty = require "tycho"
local arguments = require "tycho.arguments"
local files = require "tycho.dist.universal_files"
local Group = require "tycho.dist.group"
local parts_of = require "tycho.dist.universal_parts"
local plans = require "tycho.dist.universal_plan"
local texts = require "tycho.dist.texts"

local expect, fail = arguments.expect, arguments.fail
local clock = ty.core.system.clock

--- What saves a rank's part of checkpoints in the background.
---@class UniversalSaver
---@field stats table  saves: how many; stalls: of each the seconds of the rank's clock that save() took; seconds: those
-- of the wall from its call until the rank's files were written (rank 0: until it counted); bytes: that it writes each
-- time, of the `had` that it has; plans: how often it was decided anew who writes what
---@field loads integer[]  bytes that each rank writes
local Saver = {}
Saver.__index = Saver
Saver.__name = "UniversalSaver"

-- ---- the thread that writes ----

-- Runs in a Lua state of its own.
local function writer(rank, ranks, rate, patience)
  local tycho, store = require "tycho", require "tycho.dist.universal_files"
  local sweep = require "tycho.folders".remove
  local fs, system = tycho.io, tycho.core.system
  local entries

  -- Until the others have written, or one of them has failed.
  local function wait_for_all(folder)
    local until_when = system.clock() + patience
    for other = 1, ranks - 1 do
      local file = folder .. "/" .. store.rank_name(other)
      while not fs.exists(file .. ".json") do
        if fs.exists(file .. ".failed") then error(("rank %d: %s"):format(other, fs.read(file .. ".failed")), 0) end
        if system.clock() > until_when then error(("rank %d has not written its part"):format(other), 0) end
        system.sleep(0.002)
      end
    end
  end

  -- What runs before this one were killed at.
  local function remove_left(path, token)
    local parent, name = path:match "^(.*)/([^/]*)$"
    parent, name = parent or ".", name or path
    local stem = name .. ".partial"
    local ours = stem .. "-" .. token .. "-"
    for _, other in ipairs(fs.listdir(parent)) do
      if other:sub(1, #stem) == stem and other:sub(1, #ours) ~= ours then sweep(parent .. "/" .. other) end
    end
  end

  return function(job)
    entries = job.entries or entries
    local tensors = {}
    for i, x in ipairs(job.tensors) do tensors[entries[i].key] = x end
    fs.mkdir(job.folder)
    local ok, result = pcall(store.write, job.folder, rank, tensors, entries, rate)
    if not ok then
      if rank > 0 then
        pcall(fs.write_atomic, ("%s/%s.failed"):format(job.folder, store.rank_name(rank)), tostring(result))
      end
      error(result, 0)
    end
    if rank == 0 then
      wait_for_all(job.folder)
      store.commit(job.path, job.folder, ranks, job.values)
      if job.first then remove_left(job.path, job.token) end
    end
    return system.clock() - job.began
  end
end

-- ---- a rank's side ----

--- A saver of a rank; all ranks of the group make one. options: chunk (4 MiB: the bytes of a tensor that are written,
-- and later read, as one), rate (0: no limit; bytes a second that a rank writes at most), patience (600: seconds that
-- rank 0 waits for the others to have written).
---@param group RankGroup
---@param options? { chunk?: integer, rate?: integer, patience?: number }
---@return UniversalSaver
local function new(group, options)
  local who = "dist.universal.saver"
  Group.expect(who, group)
  local o = arguments.read(who, options, { chunk = 4 << 20, rate = 0, patience = 600 },
    { chunk = "an integer >= 1", rate = "an integer >= 0", patience = "a number > 0" })
  local token = texts.broadcast(group, ("%d-%d"):format(math.floor(1000 * ty.core.system.time()),
    ty.core.system.pid()))
  return setmetatable({ group = group, chunk = o.chunk, token = token, number = 0, buffers = {}, seen = {},
    thread = ty.thread.new(writer, group.rank, group.size, o.rate, o.patience),
    stats = { saves = 0, stalls = {}, seconds = {}, bytes = 0, had = 0, plans = 0 } }, Saver)
end

-- What the pieces are, so that it is known when they are others.
local function signature(pieces)
  local list = {}
  for i, p in ipairs(pieces) do
    local part = p.part
    list[i] = table.concat({ p.name, p.slot, p.begin or 0, p.tensor.dtype, p.tensor:numel(), part.kind, part.index,
      part.count, part.dim or "", part.parts or "", tostring(part.padded), table.unpack(part.shape) }, ":")
  end
  return table.concat(list, "\n")
end

-- Decides who writes what; all ranks come to the same.
local function make_plan(self, pieces)
  local group = self.group
  local runs, said = plans.runs(pieces, self.chunk), {}
  for i, run in ipairs(runs) do said[i] = ("%s\0%d"):format(run.id, run.bytes) end
  local lists = {}
  for rank, text in ipairs(texts.gather(group, table.concat(said, "\1"))) do
    lists[rank] = {}
    for item in text:gmatch "[^\1]+" do
      local id, bytes = item:match "^(.*)%z(%d+)$"
      table.insert(lists[rank], { id, math.tointeger(tonumber(bytes)) })
    end
  end
  local to, loads = plans.writers(lists)
  local mine, entries, taken, had = {}, {}, {}, 0
  for _, run in ipairs(runs) do
    had = had + run.bytes
    if to[run.id] == group.rank + 1 and not taken[run.id] then
      taken[run.id] = true
      local n = #mine + 1
      mine[n] = run
      entries[n] = { key = ("%d"):format(n), name = run.name, slot = run.slot, begin = run.begin, part = run.part }
    end
  end
  self.runs, self.entries, self.fresh, self.buffers = mine, entries, true, {}
  self.stats.plans, self.stats.bytes, self.stats.had, self.loads = self.stats.plans + 1, loads[group.rank + 1], had,
    loads
end

-- Takes in what the thread has done; raises its error.
local function settle(self)
  if self.thread:pending() == 0 then return end -- nothing is being written
  local ok, result = pcall(self.thread.receive, self.thread)
  if not ok then
    local text = tostring(result):gsub("^in a worker thread: ", ""):gsub("^[^\n]-%.lua:%d+: ", ""):gsub("\n.*", "")
    error("dist.universal.saver: " .. text, 0)
  end
  self.stats.seconds[#self.stats.seconds + 1] = result
end

--- Copies what this rank is to write, and goes on; it is written meanwhile. Where the save before is still under way,
-- it waits for that. pieces and values are those of dist.universal.save. All ranks call it.
---@param path string  a folder
---@param pieces { name: string, slot: string, tensor: Tensor, part: UniversalPart, begin?: integer }[]
---@param values? table<string, string|number|boolean>  of rank 0
function Saver:save(path, pieces, values)
  local who = "UniversalSaver:save"
  if getmetatable(self) ~= Saver then fail("%s: expected a saver, got %s", who, arguments.describe(self)) end
  expect(who, "path", path, "a string")
  expect(who, "pieces", pieces, "a list of tables")
  expect(who, "values", values, "a table or nil")
  if not self.thread then fail("%s: the saver was closed", who) end
  files.check_values(who, values or {})
  for i, piece in ipairs(pieces) do parts_of.check_piece(who, i, piece) end
  local group, began, since = self.group, clock(), self.group:clock()
  settle(self)
  local text = signature(pieces)
  local same = ty.tensor({ text == self.signature and 1 or 0 }, { dtype = "i64" })
  if group:all_reduce(same, "min"):item() == 0 then
    make_plan(self, pieces)
    self.signature = text
  end
  ty.no_grad(function()
    for i, run in ipairs(self.runs) do
      local x = pieces[run.piece].tensor:detach():contiguous()
      if run.count < x:numel() then x = x:reshape(-1):narrow(0, run.from, run.count) end
      local buffer = self.buffers[i]
      if buffer then buffer:copy_(x) else self.buffers[i] = ty.keep(x:to("cpu"):clone()) end
    end
  end)
  self.number = self.number + 1
  self.thread:send { folder = ("%s.partial-%s-%d"):format(path, self.token, self.number), path = path,
    token = self.token, first = not self.seen[path], tensors = self.buffers, values = values or {}, began = began,
    entries = self.fresh and self.entries or nil }
  self.fresh, self.seen[path] = false, true
  local stats = self.stats
  stats.saves = stats.saves + 1
  stats.stalls[stats.saves] = group:clock() - since
end

--- Waits until what was saved last counts: it is what is loaded after a kill. Raises on all ranks where one has failed.
-- All ranks call it.
function Saver:wait()
  if getmetatable(self) ~= Saver then
    fail("UniversalSaver:wait: expected a saver, got %s", arguments.describe(self))
  end
  local ok, problem = true, nil
  if self.thread then ok, problem = pcall(settle, self) end
  local all = self.group:all_reduce(ty.tensor({ ok and 1 or 0 }, { dtype = "i64" }), "min"):item()
  if not ok then error(problem, 0) end
  if all == 0 then fail("UniversalSaver:wait: another rank has not written its part") end
end

--- Waits until this rank's part is written, and ends its thread; rank 0 waits for all. The saver is of no use then.
function Saver:close()
  if getmetatable(self) ~= Saver then
    fail("UniversalSaver:close: expected a saver, got %s", arguments.describe(self))
  end
  if not self.thread then return end
  local thread = self.thread
  local ok, problem = pcall(settle, self)
  self.thread = nil
  thread:close()
  for _, x in ipairs(self.buffers) do x:free() end
  if not ok then error(problem, 0) end
end
Saver.__close = Saver.close

return new
