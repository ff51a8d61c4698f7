-- Saving in the background and loading straight from what was saved: where runs of parts lie, who writes and who reads
-- what, that nothing of what training does meanwhile is written, kills, and files that are damaged.
local here = (arg and arg[0]:match ".*/" or "tests/modules/dist/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local dist = require "tycho.dist"
local shipped = require "tycho.shipped"
local parts_of = require "tycho.dist.universal_parts"
local plans = require "tycho.dist.universal_plan"
local regions = require "tycho.dist.universal_regions"

local test, equal, fails = check.test, check.equal, check.fails
local universal = dist.universal

local rules = { { "^qkv", "sharded", dim = 1, parts = 3 }, { "^w", "sharded" }, { "^col", "sharded", dim = 2 },
  { "^tall", "sharded", padded = true }, { "^mean", "averaged" }, { "", "replicated" } }
local shapes = { w = { 12, 3 }, qkv = { 2, 36, 2 }, col = { 3, 2, 8 }, tall = { 7, 2 }, mean = { 4 }, norm = { 5, 3 },
  one = {} }

test("boxes: each element of a run is where taking the part of a whole finds it", function()
  local language = universal.language(rules)
  for name, shape in pairs(shapes) do
    for _, count in ipairs { 1, 2, 4 } do
      for index = 0, count - 1 do
        local part = language:part(name, shape, index, count)
        local whole = ty.arange(parts_of.elements(shape), { dtype = "i64" }):reshape(shape)
        local own = parts_of.take(whole + 1, part):reshape(-1):tolist() -- 0: filled up
        for begin = 0, #own, 5 do
          for n = 0, math.min(#own - begin, 15), 3 do
            local flat, got = ty.zeros({ n }, { dtype = "i64" }), {}
            local boxes = regions.boxes(part, begin, n)
            local source = regions.boxes(language:part("norm", shape, 0, 1), 0, whole:numel())
            for _, m in ipairs(regions.meet(source, boxes)) do
              regions.view(flat, m[2], m.low, m.size):copy_(regions.view((whole + 1):reshape(-1), m[1], m.low, m.size))
            end
            for i = 1, n do got[i] = own[begin + i] end
            equal(flat:tolist(), got, ("%s, part %d of %d, %d from %d"):format(name, index, count, n, begin))
            local there = 0
            for _, at in ipairs(got) do if at > 0 then there = there + 1 end end
            equal(regions.count(boxes), there)
          end
        end
      end
    end
  end
end)

test("who has what: every thing once, and as much for all", function()
  local lists = { {}, {}, {} }
  for i = 1, 60 do
    for rank = 1, 3 do
      if i > 6 or rank == 1 then table.insert(lists[rank], { "item" .. i, 100 + i % 7 }) end
    end
  end
  local to, loads = plans.writers(lists)
  local sums = { 0, 0, 0 }
  for i = 1, 60 do
    local id = "item" .. i
    sums[to[id]] = sums[to[id]] + 100 + i % 7
    if i <= 6 then equal(to[id], 1) end
  end
  equal(loads, sums)
  check.ok(math.max(table.unpack(sums)) - math.min(table.unpack(sums)) <= 106, table.concat(sums, " "))
  local uneven = plans.writers { { { "a", 5 }, { "b", 1 } }, { { "a", 5 } } }
  equal({ uneven.a, uneven.b }, { 2, 1 }) -- b can be nowhere else
end)

-- What a rank has of all of the parameters: the numbers of their elements.
local function own_pieces(language, rank, ranks)
  local pieces = {}
  for name, shape in pairs(shapes) do
    local part = language:part(name, shape, rank, ranks)
    local n = parts_of.elements(shape)
    local whole = (ty.arange(n) + 0.5):reshape(shape)
    local own = parts_of.take(whole, part)
    if name == "mean" then own = whole + rank - (ranks - 1) / 2 end
    pieces[#pieces + 1] = { name = name, slot = "weight", part = part, tensor = own:clone() }
  end
  table.sort(pieces, function(a, b) return a.name < b.name end)
  return pieces
end

-- Bytes that this process has asked the system for, of files; nil where it does not say.
local function asked()
  local file = io.open "/proc/self/io"
  local text = file and file:read "a"
  if file then file:close() end
  return text and math.tointeger(tonumber(text:match "rchar: (%d+)"))
end

test("parts of all kinds to other numbers of ranks: as they were, each byte read once", function()
  for _, ranks in ipairs { 1, 2, 4 } do
    local path = scratch.file("kinds" .. ranks)
    local stats = dist.run(ranks, function(group)
      local u = require "tycho.dist".universal
      local saver <close> = u.saver(group, { chunk = 32 })
      saver:save(path, own_pieces(u.language(rules), group.rank, group.size), { steps = 3, note = "x" })
      saver:wait()
      return { bytes = saver.stats.bytes, had = saver.stats.had }
    end)
    local written, had = 0, 0
    for _, s in ipairs(stats) do written, had = written + s.bytes, had + s.had end
    local sizes = 0
    for name, shape in pairs(shapes) do
      local n = parts_of.elements(shape)
      if name == "mean" then n = n * ranks end
      if name == "tall" then n = (7 + ranks - 1) // ranks * ranks * 2 end
      sizes = sizes + 4 * n
    end
    equal(written, sizes, ranks .. " ranks write one copy")
    equal(had > written, ranks > 1)
    -- Nothing is left beside.
    for _, name in ipairs(ty.io.listdir(scratch.folder)) do equal(name:find "partial", nil, name) end
    for _, others in ipairs { 1, 2, 4 } do
      local before = asked()
      local got = dist.run(others, function(group)
        local u = require "tycho.dist".universal
        local language, wanted = u.language(rules), {}
        for name, shape in pairs(shapes) do
          wanted[#wanted + 1] = { name = name, slot = "weight",
            part = language:part(name, shape, group.rank, group.size) }
        end
        local reader = u.load(group, path)
        local out = { bytes = reader.bytes, values = reader.values, names = reader.names }
        for i, x in ipairs(reader:read(wanted)) do out[wanted[i].name] = x end
        out.flat = reader:read { { name = "norm", slot = "weight", begin = 4, count = 7,
          part = language:part("norm", { 5, 3 }, 0, 1) } }[1]
        equal(reader:slots "norm", { "weight" })
        equal(reader:shape "norm", { 5, 3 })
        equal(reader:slots "nobody", nil)
        out.bytes = reader.bytes
        return out
      end)
      local label, bytes = ("from %d to %d"):format(ranks, others), 0
      for rank, out in ipairs(got) do
        bytes = bytes + out.bytes
        local want = own_pieces(universal.language(rules), rank - 1, others)
        for _, piece in ipairs(want) do
          local wanted = piece.name == "mean" and { 0.5, 1.5, 2.5, 3.5 } or piece.tensor:tolist()
          equal(out[piece.name]:tolist(), wanted, label .. ": " .. piece.name)
        end
        equal(out.flat:tolist(), { 4.5, 5.5, 6.5, 7.5, 8.5, 9.5, 10.5 })
        equal(out.values, { steps = 3, note = "x" })
        equal(#out.names, 7)
      end
      local again = 60 -- both runs of norm were wanted once more
      local filled = sizes -- but for runs of what was only filled up, which nobody wants
      if ranks == 4 then filled = sizes - 4 * 2 end
      check.ok(bytes <= sizes + again and bytes >= filled + again, ("%s: %d bytes, not %d"):format(label, bytes,
        sizes + again))
      if before then
        check.ok(asked() - before >= bytes, "the system knows of them")
      end
    end
    -- What is saved so is put together as what ranks save at once is.
    local whole = dist.run(1, function(group)
      local u = require "tycho.dist".universal
      local c = u.open(group, path)
      return c:take("qkv", "weight", u.language(rules):part("qkv", shapes.qkv, 0, 1))
    end)[1]
    equal(whole:tolist(), (ty.arange(144) + 0.5):reshape(2, 36, 2):tolist())
  end
end)

local work = dist.workload.open { length = 6, width = 32, heads = 4, layers = 1, rows = 4, chapters = 12,
  vocabulary = 260 }

test("every layout goes on from every other as if it had been put together before, bit for bit", function()
  local layouts = { { 2, 2 }, { 1, 2, true }, { 4, 1 } }
  local function of(l) return { tensor = l[1], data = l[2], replicas = l[3], dtype = "f64" } end
  local function train(group, o, load, directly, save)
    local d = require "tycho.dist"
    local t, got = d.universal_trial.new(group, work, o), nil
    if load then got = t:load(load, directly) end
    local out = { bytes = got and got.bytes }
    if save then
      local saver <close> = d.universal.saver(group, { chunk = 4096 })
      if not load then for _ = 1, 3 do t:step() end end
      t:save(save, saver)
      saver:wait()
      t:save(save, saver) -- in the place of the first, with the same plan
      saver:wait()
      d.universal.consolidate(group, save)
      out.plans, out.written = saver.stats.plans, saver.stats.bytes
    end
    out.losses = { t:step(), t:step() }
    return out
  end
  local function atoms(path)
    local all = {}
    for _, name in ipairs(ty.io.listdir(path .. "/atoms")) do all[name] = scratch.slurp(path .. "/atoms/" .. name) end
    return all
  end
  for a, from in ipairs(layouts) do
    local path = scratch.file("pair" .. a)
    local first = dist.run(from[1] * from[2], train, nil, of(from), nil, nil, path)
    local copy = 0
    for _, out in ipairs(first) do
      copy = copy + out.written
      equal(out.plans, 1)
    end
    local saved = atoms(path)
    for b, to in ipairs(layouts) do
      local again = scratch.file(("again%d.%d"):format(a, b))
      local ranks = to[1] * to[2]
      local directly = dist.run(ranks, train, nil, of(to), path, true, again)
      local by_atoms = dist.run(ranks, train, nil, of(to), path, false)
      local label, bytes = ("from %d to %d"):format(a, b), 0
      for rank = 1, ranks do
        equal(directly[rank].losses, by_atoms[rank].losses, label)
        bytes = bytes + directly[rank].bytes
      end
      equal(bytes, copy, label .. ": bytes read")
      local other = atoms(again)
      for name, text in pairs(saved) do equal(other[name] == text, true, label .. ": " .. name) end
    end
  end
end)

test("what training does while it is written is not written", function()
  local path = scratch.file "snapshot"
  local stall = dist.run(2, function(group)
    local t, u = require "tycho", require "tycho.dist".universal
    local language = u.language { { "", "sharded" } }
    local x = t.full({ 50000 }, group.rank + 1)
    local pieces = { { name = "x", slot = "weight", tensor = x, part = language:part("x", { 100000 }, group.rank, 2) } }
    local saver <close> = u.saver(group, { rate = 1000000 })
    for n = 1, 3 do
      saver:save(path, pieces, { n = n })
      x:add_(10) -- at once: 200 KB take 0.2 s to be written
    end
    saver:wait()
    return math.min(table.unpack(saver.stats.seconds))
  end)
  check.ok(stall[1] > 0.15, tostring(stall[1]))
  local x, n = table.unpack(dist.run(1, function(group)
    local u = require "tycho.dist".universal
    local reader = u.load(group, path)
    return { reader:read { { name = "x", slot = "weight",
      part = u.language { { "", "sharded" } }:part("x", { 100000 }, 0, 1) } }[1], reader.values.n }
  end)[1])
  equal(n, 3)
  equal({ x:narrow(0, 0, 50000):min():item(), x:narrow(0, 0, 50000):max():item() }, { 21, 21 })
  equal({ x:narrow(0, 50000, 50000):min():item(), x:narrow(0, 50000, 50000):max():item() }, { 22, 22 })
end)

test("what killed runs have left beside a checkpoint goes; what others have does not", function()
  local path = scratch.file "left"
  for _, name in ipairs { "left.partial-1-2-3", "left.partial", "left-of.partial-1-2-3", "left.previous" } do
    ty.io.mkdir(scratch.file(name))
    scratch.spit(name .. "/rank-0000.json", "{}")
  end
  dist.run(2, function(group)
    local u = require "tycho.dist".universal
    local saver <close> = u.saver(group)
    for n = 1, 2 do saver:save(path, own_pieces(u.language(rules), group.rank, group.size), { n = n }) end
    saver:wait()
  end)
  local there = {}
  for _, name in ipairs(ty.io.listdir(scratch.folder)) do if name:find "^left" then there[#there + 1] = name end end
  equal(there, { "left", "left-of.partial-1-2-3" })
end)

test("jobs that are killed lose nothing, and go on bit for bit", function()
  local report = dist.universal_kills.run { folder = scratch.file "kills", kills = 2, longest = 0.5, width = 32,
    layers = 1, rate = 2000000, more = 4 }
  equal({ report.kills, report.lost, report.differ }, { 2, 0, 0 })
  check.ok(report.steps > 4, "it came on")
end)

local function save(path, change)
  dist.run(2, function(group)
    local u = require "tycho.dist".universal
    local pieces = own_pieces(u.language(rules), group.rank, group.size)
    if change then change(pieces, group.rank) end
    local saver <close> = u.saver(group, { chunk = 32 })
    saver:save(path, pieces)
    saver:wait()
  end)
end
local function load(path)
  return dist.run(2, function(group)
    local u = require "tycho.dist".universal
    local language, wanted = u.language(rules), {}
    for name, shape in pairs(shapes) do
      wanted[#wanted + 1] = { name = name, slot = "weight", part = language:part(name, shape, group.rank, 2) }
    end
    table.sort(wanted, function(a, b) return a.name < b.name end)
    return #u.load(group, path):read(wanted)
  end)[1]
end

test("what is missing and what is damaged is said in one error; a rank that cannot write ends it for all", function()
  local path = scratch.file "bad"
  save(path)
  equal(load(path), 7)
  save(path, function(pieces) table.remove(pieces, 1) end)
  fails(function() load(path) end, "the checkpoint has no 'col'")
  save(path, function(pieces, rank) if rank == 1 then table.remove(pieces, 7) end end)
  fails(function() load(path) end, "weight of w lacks 18 of the 18 elements that are wanted")
  for _, file in ipairs { "rank-0001.safetensors", "rank-0000.json", "state.json", "checksums.json" } do
    save(path)
    local text = scratch.slurp(path .. "/" .. file)
    for _, broken in ipairs { "", text:sub(1, #text // 2), text:sub(1, -2) .. "\1" } do
      scratch.spit("bad/" .. file, broken)
      fails(function() load(path) end, "dist.run: rank ")
    end
    scratch.flips(text, 8, function(broken)
      scratch.spit("bad/" .. file, broken)
      if file:find "json" and file ~= "checksums.json" then shipped.write_checksums(path) end
      local ok, problem = pcall(load, path)
      equal(ok or type(problem) == "string" and problem:find("dist.run: rank ", 1, true) ~= nil, true, problem)
    end)
    os.remove(path .. "/" .. file)
    fails(function() load(path) end, "dist.run: rank ")
  end
  fails(function() load(scratch.file "none") end, "there is no checkpoint at")
  -- A file is where the folder is to come.
  scratch.spit("file", "")
  fails(function() save(scratch.file "file/inside") end, "dist.run: rank ")
end)

test("arguments", function()
  fails(function() universal.saver(3) end, "group: expected a group, got 3")
  fails(function() universal.load(3, "x") end, "group: expected a group, got 3")
  local function on_rank(fn) return function() dist.run(1, fn) end end
  local function saving(options, ...)
    local given = table.pack(...)
    return on_rank(function(g) require "tycho.dist".universal.saver(g, options):save("x", table.unpack(given)) end)
  end
  fails(saving({ chunk = 0 }, {}), "chunk: expected an integer >= 1")
  fails(saving({}, { {} }), "piece 1: name: expected")
  fails(saving({}, {}, { f = print }), "values: expected")
  fails(on_rank(function(g)
    local s = require "tycho.dist".universal.saver(g)
    s:close()
    s:save("x", {})
  end), "the saver was closed")
  fails(function() dist.universal_kills.run {} end, "folder: expected a string")
  local path = scratch.file "arguments"
  save(path)
  fails(on_rank(function(g)
    require "tycho.dist".universal.load(g, path):read { { name = "w", slot = "weight" } }
  end), "part: expected one of language:part()")
  fails(on_rank(function(g)
    local u = require "tycho.dist".universal
    u.load(g, path):read { { name = "w", slot = "weight", begin = 30, count = 7,
      part = u.language(rules):part("w", { 12, 3 }, 0, 1) } }
  end), "expected at most the 36 elements of the part, got 7 from 30 on")
  fails(on_rank(function(g)
    local u = require "tycho.dist".universal
    u.load(g, path):read { { name = "w", slot = "weight", part = u.language(rules):part("w", { 12, 4 }, 0, 1) } }
  end), "w has shape [12, 3] in the checkpoint, expected [12, 4]")
  fails(on_rank(function(g)
    local u = require "tycho.dist".universal
    u.load(g, path):read { { name = "w", slot = "exp_avg", part = u.language(rules):part("w", { 12, 3 }, 0, 1) } }
  end), "the checkpoint has no exp_avg of 'w'")
end)

check.finish()
