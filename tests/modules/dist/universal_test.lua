-- Universal checkpoints: the language of parts, every pair of layouts, kills while saving, and files that are damaged.
local here = (arg and arg[0]:match ".*/" or "tests/modules/dist/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local dist = require "tycho.dist"
local shipped = require "tycho.shipped"

local test, equal, near, fails = check.test, check.equal, check.close, check.fails
local universal, trial = dist.universal, dist.universal_trial

local rules = { { "^qkv", "sharded", dim = 1, parts = 3 }, { "^w", "sharded" }, { "^tall", "sharded", padded = true },
  { "^mean", "averaged" }, { "", "replicated" } }

-- A tensor whose elements all differ.
local function counted(...) return ty.arange(ty.ones(...):numel()):reshape(...) end

-- Of n equal parts along a dimension the i-th, from 0.
local function cut(x, n, dim, i)
  local size = x.shape[dim + 1] // n
  return x:narrow(dim, i * size, size):contiguous()
end

test("parts of all kinds, from and to other numbers of ranks, with optimizers' parts and stages", function()
  local shapes = { w = { 12, 3 }, qkv = { 2, 36 }, tall = { 7, 2 }, mean = { 4 }, norm = { 5 } }
  for _, ranks in ipairs { 1, 2, 4 } do
    local path = scratch.file("kinds" .. ranks)
    dist.run(ranks, function(group)
      local u = require "tycho.dist".universal
      local language, pieces = u.language(rules), {}
      for name, shape in pairs(shapes) do
        local part = language:part(name, shape, group.rank, group.size)
        local whole, own = counted(table.unpack(shape)) + 0.5, nil
        if name == "w" then own = cut(whole, group.size, 0, group.rank) end
        if name == "qkv" then
          local list = {}
          for i = 1, 3 do list[i] = cut(cut(whole, 3, 1, i - 1), group.size, 1, group.rank) end
          own = ty.concat(list, 1)
        end
        if name == "tall" then
          local n = (7 + group.size - 1) // group.size
          local filled = ty.concat({ whole, ty.full({ n * group.size - 7, 2 }, -1) }, 0)
          own = filled:narrow(0, group.rank * n, n)
        end
        if name == "mean" then own = whole + group.rank - (group.size - 1) / 2 end
        if name == "norm" then own = whole end
        equal(own.shape, part.own, name)
        if name == "w" then -- laid flat, in two pieces
          local half = own:numel() // 2
          for i = 0, 1 do
            pieces[#pieces + 1] = { name = name, slot = "weight", part = part, begin = i * half,
              tensor = own:reshape(-1):narrow(0, i * half, i == 0 and half or own:numel() - half) }
          end
        else
          pieces[#pieces + 1] = { name = name, slot = "weight", part = part, tensor = own }
        end
      end
      -- A parameter of the stage of one rank.
      local name = "stage" .. group.rank
      pieces[#pieces + 1] = { name = name, slot = "weight", tensor = ty.full({ 2 }, group.rank),
        part = language:part(name, { 2 }, 0, 1) }
      u.save(group, path, pieces, { steps = 3, note = "x", rate = 0.1 })
    end)
    for _, others in ipairs { 1, 2, 4 } do
      local got = dist.run(others, function(group)
        local u = require "tycho.dist".universal
        local language = u.language(rules)
        local c = u.open(group, path)
        local out = { names = c.names, values = c.values, slots = c:slots "w" }
        for name, shape in pairs(shapes) do
          out[name] = c:take(name, "weight", language:part(name, shape, group.rank, group.size))
        end
        out.flat = c:take("w", "weight", language:part("w", shapes.w, group.rank, group.size), 2, 5)
        out.stage = c:take("stage0", "weight", language:part("stage0", { 2 }, 0, 1))
        return out
      end)
      local label = ("from %d to %d"):format(ranks, others)
      local lists = {}
      for name in pairs(shapes) do
        lists[name] = {}
        for rank, out in ipairs(got) do lists[name][rank] = out[name] end
      end
      local w = counted(12, 3) + 0.5
      equal(ty.concat(lists.w, 0):tolist(), w:tolist(), label)
      equal(got[1].flat:tolist(), w:reshape(-1):narrow(0, 2, 5):tolist())
      for i = 1, 3 do
        local of = {}
        for rank, x in ipairs(lists.qkv) do of[rank] = cut(x, 3, 1, i - 1) end
        equal(ty.concat(of, 1):tolist(), cut(counted(2, 36) + 0.5, 3, 1, i - 1):tolist(), label)
      end
      equal(ty.concat(lists.tall, 0):narrow(0, 0, 7):tolist(), (counted(7, 2) + 0.5):tolist(), label)
      for rank = 1, others do
        near(got[rank].mean:tolist(), { 0.5, 1.5, 2.5, 3.5 }, 1e-6)
        equal(got[rank].norm:tolist(), { 0.5, 1.5, 2.5, 3.5, 4.5 })
      end
      equal(got[1].stage:tolist(), { 0, 0 })
      equal(#got[1].names, 5 + ranks)
      equal(got[1].values, { steps = 3, note = "x", rate = 0.1 })
      equal(got[1].slots, { "weight" })
    end
  end
end)

local work = dist.workload.open { length = 6, width = 32, heads = 4, layers = 1, rows = 4, chapters = 12,
  vocabulary = 260 }

-- Loads, trains, saves, and says two losses more.
local function train(group, o, load, steps, save)
  local t = require "tycho.dist".universal_trial.new(group, work, o)
  if load then t:load(load) end
  for _ = 1, steps do t:step() end
  if save then
    t:save(save)
    require "tycho.dist".universal.consolidate(group, save)
  end
  return { t:step(), t:step() }
end

local function atoms(path)
  local all = {}
  for _, name in ipairs(ty.io.listdir(path .. "/atoms")) do all[name] = scratch.slurp(path .. "/atoms/" .. name) end
  return all
end

test("every layout goes on from every other: the next losses, and all that optimizers know, bit for bit", function()
  local layouts = { { 2, 2 }, { 1, 2 }, { 2, 1 }, { 1, 1 }, { 1, 4 } }
  for a, from in ipairs(layouts) do
    local path = scratch.file("pair" .. a)
    local function of(l) return { tensor = l[1], data = l[2], dtype = "f64" } end
    local want = dist.run(from[1] * from[2], train, nil, of(from), nil, 3, path)
    local saved = atoms(path)
    for b, to in ipairs(layouts) do
      local again = scratch.file(("again%d.%d"):format(a, b))
      local got = dist.run(to[1] * to[2], train, nil, of(to), path, 0, again)
      local label = ("from %d x %d to %d x %d"):format(from[1], from[2], to[1], to[2])
      for rank = 1, #got do near(got[rank], want[1], 1e-12, label) end
      local other = atoms(again)
      for name, text in pairs(saved) do equal(other[name] == text, true, label .. ": " .. name) end
    end
  end
  -- The state of the optimizer makes a difference: it is there.
  local moments = ty.io.load_safetensors(scratch.file "pair1" .. "/atoms/00003.safetensors")
  local count = 0
  for _, x in pairs(moments) do
    count = count + 1
    equal(x:abs():sum():item() > 0, true)
  end
  equal(count, 3)
end)

test("a kill while saving leaves the old checkpoint or the new one", function()
  local path, began = scratch.file "killed", scratch.file "began"
  local child = scratch.spit("child.lua", ([[
    local dist = require "tycho.dist"
    local path, began = %q, %q
    dist.run(2, function(group)
      local ty, dist = require "tycho", require "tycho.dist"
      local language = dist.universal.language { { "", "sharded" } }
      local n = 0
      if dist.universal.exists(path) then n = dist.universal.open(group, path).values.n end
      while true do
        n = n + 1
        local pieces = {}
        for i = 1, 5 do
          local name = "p" .. i
          pieces[i] = { name = name, slot = "weight", tensor = ty.full({ 1000 }, n),
            part = language:part(name, { 2000 }, group.rank, 2) }
        end
        dist.universal.save(group, path, pieces, { n = n })
        if group.rank == 0 then io.open(began, "w"):close() end
      end
    end)
  ]]):format(path, began))
  local seen = 0
  for kill = 1, 4 do
    os.remove(began)
    local pid = io.popen(scratch.program(child) .. " >/dev/null 2>&1 & echo $!"):read "a":match "%d+"
    local tries = 0
    while not ty.io.exists(began) and tries < 2000 do
      os.execute "sleep 0.01"
      tries = tries + 1
    end
    os.execute(("sleep 0.%03d; kill -9 %s"):format(7 * kill, pid))
    local got = dist.run(1, function(group)
      local d = require "tycho.dist"
      local c = d.universal.open(group, path)
      local language = d.universal.language { { "", "replicated" } }
      local out = { c.values.n }
      for i = 1, 5 do
        local x = c:take("p" .. i, "weight", language:part("p" .. i, { 2000 }, 0, 1))
        out[i + 1] = x:min():item()
        equal(x:max():item(), out[i + 1])
      end
      return out
    end)[1]
    for i = 2, 6 do equal(got[i], got[1]) end
    equal(got[1] > seen, true, ("%s after %d"):format(got[1], seen))
    seen = got[1]
  end
end)

test("what is missing, what differs and what is damaged is said in one error", function()
  local path = scratch.file "bad"
  local function save(change)
    dist.run(2, function(group)
      local u = require "tycho.dist".universal
      local language = u.language(rules)
      local pieces = {
        { name = "w", slot = "weight", tensor = ty.full({ 2, 2 }, group.rank),
          part = language:part("w", { 4, 2 }, group.rank, 2) },
        { name = "norm", slot = "weight", tensor = ty.ones(3), part = language:part("norm", { 3 }, group.rank, 2) } }
      change(pieces, group.rank, language)
      u.save(group, path, pieces)
    end)
  end
  local function open()
    return dist.run(1, function(group)
      local u = require "tycho.dist".universal
      local c = u.open(group, path)
      for _, name in ipairs(c.names) do
        if name == "w" then c:take("w", "weight", u.language(rules):part("w", { 4, 2 }, 0, 1)) end
      end
      return #c.names
    end)[1]
  end
  save(function() end)
  equal(open(), 2)
  save(function(pieces, rank) if rank == 1 then table.remove(pieces, 1) end end)
  fails(open, "weight of w lacks part 1 of 2")
  save(function(pieces, rank)
    if rank == 1 then pieces[1].tensor, pieces[1].begin = ty.ones(2), 1 end
  end)
  fails(open, "weight of w lacks the elements from 0 to 0 of part 1")
  save(function(pieces, rank) if rank == 1 then pieces[2].tensor = ty.zeros(3) end end)
  fails(open, "weight of norm is not the same on all ranks")
  save(function(pieces, rank, language)
    if rank == 1 then pieces[1] = { name = "w", slot = "weight", tensor = ty.ones(6, 1),
      part = language:part("w", { 12, 1 }, 1, 2) } end
  end)
  fails(open, "ranks differ about weight of w: shape")
  fails(function() save(function(pieces) pieces[1].tensor = ty.ones(3, 2) end) end,
    "tensor: expected [2, 2], or elements of it in one dimension, got a tensor [3, 2]")
  fails(function() dist.run(1, function(g) require "tycho.dist".universal.open(g, scratch.file "none") end) end,
    "there is no checkpoint at")

  -- Cut and changed files, with sums that tell and with such as fit.
  for _, file in ipairs { "rank-0001.json", "rank-0001.safetensors", "state.json", "checksums.json",
    "atoms/index.json", "atoms/00000.safetensors", "atoms/checksums.json" } do
    local function fresh()
      save(function() end)
      equal(open(), 2)
      if not file:find "atoms" then os.execute(("rm -r '%s/atoms'"):format(path)) end
      return scratch.slurp(path .. "/" .. file)
    end
    local text = fresh()
    for _, broken in ipairs { "", text:sub(1, #text // 2), text:sub(1, -2) .. "\1" } do
      scratch.spit("bad/" .. file, broken)
      fails(open, "dist.run: rank 0: ")
    end
    if not file:find "checksums" then
      local folder = path .. (file:match "^(atoms)/" and "/atoms" or "")
      scratch.flips(text, 6, function(broken)
        scratch.spit("bad/" .. file, broken)
        shipped.write_checksums(folder)
        local ok, problem = pcall(open)
        equal(ok or type(problem) == "string" and problem:find("rank 0: ", 1, true) ~= nil, true, problem)
        os.execute(("rm -rf '%s/atoms.partial'"):format(path))
        if not file:find "atoms" then os.execute(("rm -rf '%s/atoms'"):format(path)) end
      end)
    end
    os.execute(("rm -r '%s'"):format(path))
  end
end)

test("arguments", function()
  fails(function() universal.language { { "x", "cut" } } end, 'rule 1: kind: expected "replicated" or')
  fails(function() universal.language { { "[", "sharded" } } end, "rule 1: pattern: ")
  fails(function() universal.language { { "x", "sharded", parts = 2, padded = true } } end, "expected parts or padded")
  local language = universal.language { { "^w", "sharded", dim = 1 } }
  fails(function() language:part("x", { 2 }, 0, 1) end, "name: expected one that a rule finds, got x")
  fails(function() language:part("w", { 2, 3 }, 0, 2) end, "w: 3 along dimension 1 is no multiple of 2")
  fails(function() language:part("w", { 2 }, 0, 2) end, "w: no dimension 1 in [2]")
  fails(function() language:part("w", { 2, 4 }, 2, 2) end, "index: expected one of 2, from 0, got 2")
  fails(function() language:part("w", { -1 }, 0, 2) end, "shape: expected that of a tensor")
  fails(function() universal.save(3, "x", {}) end, "group: expected a group, got 3")
  fails(function() dist.run(1, function(g) universal.save(g, "x", {}, { f = print }) end) end,
    "values: expected texts, booleans and finite numbers")
  fails(function() dist.run(1, function(g) universal.save(g, "x", { {} }) end) end, "piece 1: name: expected a string")
  fails(function() trial.new(3, work) end, "group: expected a group")
end)

check.finish()
