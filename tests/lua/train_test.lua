-- The training loop, metrics, checkpoints; resuming bit for bit after kills.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn, optim, train = ty.nn, ty.optim, ty.train

local root = os.tmpname()
os.remove(root)
ty.io.mkdir(root)

local function remove_all(path)
  local info = ty.io.stat(path)
  if not info then return end
  if info.kind == "directory" then
    for _, name in ipairs(ty.io.listdir(path)) do remove_all(path .. "/" .. name) end
  end
  ty.io.remove(path)
end

check.test("steps: counting, batches, scopes", function()
  local loader = ty.data.DataLoader(ty.data.TensorDataset { x = ty.arange(4) }, { batch_size = 2 })
  local steps, kept, lost = {}, {}, nil
  for step, batch, log in train.steps(loader, 5, { quiet = true, start = 2 }) do
    steps[#steps + 1] = { step, batch.x:tolist() }
    kept[#kept + 1] = ty.keep(batch.x * 2)
    lost = batch.x + 1
    log { loss = batch.x:to("f32"):mean() }
  end
  check.equal(steps, { { 3, { 0, 1 } }, { 4, { 2, 3 } }, { 5, { 0, 1 } } })
  check.equal(kept[2]:tolist(), { 4, 6 })
  check.fails(function() lost:tolist() end, "released")
  local count = 0
  for step, batch in train.steps(nil, 3, { quiet = true }) do
    count = count + step
    check.equal(batch, nil)
  end
  check.equal(count, 6)
  for step, value in train.steps(function() return "b" end, 9, { quiet = true }) do
    check.equal(value, "b")
    if step == 2 then break end
  end
  local after = ty.zeros(1)
  check.equal(after:item(), 0, "the scope of a loop that was left is closed")
  check.fails(function() for _ in train.steps(nil, 2, { quiet = true }) do error "inside" end end, "inside")
  for _ in train.steps(nil, 0, { quiet = true }) do check.ok(false, "no step expected") end
  check.fails(function() train.steps(nil, -1) end, "train.steps: count: expected an integer >= 0, got -1")
end)

check.test("memory stays flat over steps", function()
  local model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
  local opt = optim.AdamW(model:parameters())
  local x, y = ty.randn(16, 32), ty.randint(0, 10, { 16 })
  local live = {}
  collectgarbage "stop"
  for step in train.steps(nil, 60, { quiet = true }) do
    opt:step(nn.cross_entropy(model(x), y))
    live[step] = ty.memory.stats("cpu").live
  end
  collectgarbage "restart"
  check.equal(live[60], live[5], "live bytes at the end of steps 5 and 60, with the collector off")
end)

check.test("progress in plain lines", function()
  local lines = {}
  local stream = { write = function(_, ...) lines[#lines + 1] = table.concat { ... } end, flush = function() end }
  local progress = train.progress(20, { title = "t", stream = stream })
  for step = 1, 20 do
    progress:set { loss = 1 / step }
    progress:advance(step)
  end
  progress:finish()
  check.equal(#lines, 10)
  check.equal(lines[10]:match "^t 20/20" ~= nil and lines[10]:match "loss 0.05" ~= nil, true, lines[10])
  check.equal(lines[5]:match "left" ~= nil, true, lines[5])
end)

check.test("metrics as JSON lines, continued when resumed", function()
  local folder = root .. "/log"
  local logger = train.Logger(folder, { tensorboard = true })
  for step = 1, 5 do logger:log(step, { loss = step / 2, bad = 0 / 0 }) end
  logger:close()
  logger:close()
  local again = train.Logger(folder, { resume = 3 })
  again:log(4, { loss = 9.5 })
  again:close()
  local losses = {}
  for line in ty.io.lines(folder .. "/metrics.jsonl") do
    local entry = ty.io.json_decode(line)
    losses[#losses + 1] = entry.step .. ":" .. entry.loss
  end
  check.equal(losses, { "1:0.5", "2:1.0", "3:1.5", "4:9.5" })
  local events = 0
  for _, name in ipairs(ty.io.listdir(folder)) do events = events + (name:match "tfevents" and 1 or 0) end
  check.equal(events, 1)
end)

check.test("what a run is, beside its metrics", function()
  local folder = root .. "/about"
  local logger <close> = train.Logger(folder)
  local function about() return ty.io.load_json(folder .. "/run.json") end
  logger:about { steps = 7, title = "first", options = { lr = 0.5, huge = math.huge, widths = { 1, print, 3 },
    run = print, nested = { a = { b = { c = 1 } } }, bytes = "\255" } }
  local read = about()
  check.equal({ read.steps, read.title, read.options.lr, read.options.huge }, { 7, "first", 0.5, "inf" })
  check.equal(read.options.widths, { 1, "function", 3 })
  check.equal({ read.options.run, read.options.bytes, read.options.nested.a.b }, {})
  check.ok(math.abs(read.began - os.time()) < 100)
  local count = 0
  for _ in train.steps(nil, 3, { logger = logger, quiet = true, title = "second" }) do count = count + 1 end
  check.equal(count, 3)
  check.equal({ about().steps, about().title, about().start }, { 7, "first", 0 }, "what was said first stays")
  logger:close()
  check.fails(function() logger:about {} end, "Logger:about: the logger is closed")
  check.fails(function() logger:about(3) end, "Logger:about: values: expected a table")
end)

check.test("checkpoints keep every kind of value", function()
  local path = root .. "/values"
  local values = {
    integer = math.maxinteger, least = math.mininteger, float = 0.1, whole = 3.0, huge = math.huge, tiny = 5e-324,
    minus = -math.huge, text = "täxt", bytes = "\0\1\255\n", yes = true, list = { 1, 2, { 3.5 } }, empty = {},
    map = { [1] = "a", [3] = "b", x = 2 }, dollar = { ["$tensor"] = "no" }, tensor = ty.tensor { 1.5, 2.5 },
    nested = { a = { b = ty.arange(3) } }, [("k"):rep(3)] = { [true] = 1, [2.5] = 2 },
  }
  train.save_checkpoint(path, values)
  local back = train.load_checkpoint(path, {})
  check.equal(back.tensor:tolist(), { 1.5, 2.5 })
  check.equal(back.nested.a.b:tolist(), { 0, 1, 2 })
  check.equal(back.nested.a.b.dtype, "i64")
  for _, key in ipairs { "tensor", "nested" } do back[key], values[key] = nil, nil end
  check.equal(back, values)
  for _, key in ipairs { "integer", "float", "whole" } do
    check.equal(math.type(back[key]), math.type(values[key]), key)
  end
  train.save_checkpoint(path, { nan = 0 / 0 })
  check.equal(train.load_checkpoint(path, {}).nan ~= train.load_checkpoint(path, {}).nan, true)
  check.fails(function() train.save_checkpoint(path, { f = print }) end, "f is a function")
  check.equal(train.has_checkpoint(path), true, "a failed save leaves the old one")
  check.fails(function() train.save_checkpoint(path, { ["a/b"] = 1 }) end, "no name for a part")
  check.fails(function() train.load_checkpoint(root .. "/nowhere", {}) end, "there is none")
  local opt = optim.SGD { ty.zeros(1):requires_grad_() }
  check.fails(function() train.load_checkpoint(path, { opt = opt }) end, "has no 'opt'")
  local gone = root .. "/gone"
  train.save_checkpoint(gone, values)
  ty.io.mkdir(gone .. ".partial")
  train.remove_checkpoint(gone)
  train.remove_checkpoint(gone)
  check.equal({ train.has_checkpoint(gone), ty.io.exists(gone), ty.io.exists(gone .. ".partial") },
    { false, false, false })
  check.fails(function() train.remove_checkpoint(root) end, "train.remove_checkpoint: path: expected a checkpoint")
  check.equal(ty.io.exists(root), true)
end)

check.test("the generator is part of a checkpoint", function()
  local path = root .. "/rng"
  ty.manual_seed(5)
  ty.rand(10)
  train.save_checkpoint(path, { step = 1 })
  local expected = ty.rand(4):tolist()
  ty.manual_seed(77)
  train.load_checkpoint(path, {})
  check.equal(ty.rand(4):tolist(), expected)
  ty.manual_seed(77)
  local other = ty.rand(1):item()
  ty.manual_seed(77)
  train.load_checkpoint(path, {}, { rng = false })
  check.equal(ty.rand(1):item(), other)
end)

-- Changes one bit of a file.
local function flip(path, position)
  local file = assert(io.open(path, "rb"))
  local bytes = file:read "a"
  file:close()
  local at = math.floor(position * (#bytes - 1)) + 1
  file = assert(io.open(path, "wb"))
  file:write(bytes:sub(1, at - 1), string.char(bytes:byte(at) ~ 0x10), bytes:sub(at + 1))
  file:close()
end

check.test("a checkpoint with a flipped bit is refused", function()
  local path = root .. "/flipped"
  local function parts()
    ty.manual_seed(3)
    local model = nn.Linear(3, 2)
    return { model = model, opt = optim.AdamW(model:parameters()), note = "a text", step = 7 }
  end
  for _, name in ipairs { "model.safetensors", "state.safetensors", "state.json", "checksums.json" } do
    for position = 0, 1, 0.25 do
      train.save_checkpoint(path, parts())
      flip(path .. "/" .. name, position)
      local given = parts()
      ty.no_grad(function() given.model.weight:fill_(5) end)
      check.fails(function() train.load_checkpoint(path, given) end, "checkpoint: .*flipped is damaged: ")
      check.equal(given.model.weight:tolist(), { { 5, 5, 5 }, { 5, 5, 5 } }, "nothing was loaded")
    end
  end
  train.save_checkpoint(path, parts())
  ty.io.remove(path .. "/state.safetensors")
  check.fails(function() train.load_checkpoint(path, {}) end, "state.safetensors is not as it was written")
  train.save_checkpoint(path, parts())
  ty.io.remove(path .. "/checksums.json") -- as earlier programs wrote them
  check.equal(train.load_checkpoint(path, parts()).step, 7)
end)

check.test("crc32 is that of gzip, whatever the number of threads", function()
  local path = root .. "/crc"
  ty.io.write_atomic(path, "123456789")
  check.equal(ty.io.crc32(path), 0xcbf43926) -- the check value of the catalogue of parametrised CRCs
  ty.io.write_atomic(path, "")
  check.equal(ty.io.crc32(path), 0)
  local bytes = ("The quick brown fox "):rep(170000) .. "x" -- three pieces and some
  ty.io.write_atomic(path, bytes)
  local pipe = assert(io.popen("gzip -1 -c " .. path .. " | tail -c 8 | head -c 4"))
  local expected = ("<I4"):unpack(pipe:read "a")
  pipe:close()
  for _, threads in ipairs { 1, 2, 5 } do
    ty.set_threads(threads)
    check.equal(ty.io.crc32(path), expected)
  end
  ty.set_threads(0)
  check.fails(function() ty.io.crc32(root .. "/nowhere") end, "nowhere")
end)

check.test("the sum of a file that is being written is that of the file", function()
  local path = root .. "/summed.safetensors"
  for _, threads in ipairs { 1, 2 } do -- small tensors, and one of several pieces with a rest
    ty.set_threads(threads)
    for _, size in ipairs { 0, 3, (5 << 20) + 7, 1 } do
      local tensors = { a = ty.arange(size, { dtype = "i32" }), b = ty.ones(5), c = ty.ones((size >> 2) + 1) }
      local crc = ty.io.save_safetensors(path, tensors, { key = "text" }, { crc32 = true })
      check.equal(crc, ty.io.crc32(path))
    end
  end
  ty.set_threads(0)
  check.equal(select("#", ty.io.save_safetensors(path, {})), 0)
  check.fails(function() ty.io.save_safetensors(path, {}, nil, { crc = true }) end, "crc32")
end)

check.test("a resume with nothing to resume says so", function()
  local path = root .. "/resumed"
  check.equal(train.resume_checkpoint(path, {}, false), nil)
  check.fails(function() train.resume_checkpoint(path, {}, true) end,
    "nothing to resume: there is no checkpoint at .*resumed; without resume the run starts anew")
  local _, problem = pcall(train.resume_checkpoint, path, {}, true)
  check.ok(getmetatable(problem).__tostring, "programs print the text alone, without a traceback")
  local stderr, said = io.stderr, nil
  io.stderr = { write = function(_, text) said = text end } -- luacheck: ignore 122
  local values = train.resume_checkpoint(path, {}, "auto")
  io.stderr = stderr -- luacheck: ignore 122
  check.equal(values, nil)
  check.ok(said and said:find("nothing to resume: there is no checkpoint at", 1, true))
  train.save_checkpoint(path, { step = 4 })
  check.equal(train.resume_checkpoint(path, {}, true).step, 4)
  check.equal(train.resume_checkpoint(path, {}, "auto").step, 4)
  check.fails(function() train.resume_checkpoint(path, {}, "maybe") end, 'resume: expected a boolean or "auto" or nil')
end)

check.test("a kill between the renames leaves the old one", function()
  local path = root .. "/renames"
  train.save_checkpoint(path, { step = 1 })
  os.rename(path, path .. ".previous") -- as a kill would leave it
  ty.io.mkdir(path .. ".partial")
  ty.io.write_atomic(path .. ".partial/state.json", "{")
  check.equal(train.has_checkpoint(path), true)
  check.equal(train.load_checkpoint(path, {}).step, 1)
  train.save_checkpoint(path, { step = 2 })
  check.equal(train.load_checkpoint(path, {}).step, 2)
  check.equal(ty.io.exists(path .. ".previous") or ty.io.exists(path .. ".partial"), false)
end)

-- ---- a child that is killed again and again ----

local interpreter
do
  local first = 0
  while arg[first - 1] do first = first - 1 end
  interpreter = arg[first]
end

local function quote(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

local function child(checkpoint, steps, result)
  return ("%s %s %s %d %s"):format(quote(interpreter), quote(here .. "train_child.lua"), quote(checkpoint), steps,
    quote(result))
end

check.test("killed at random moments, resumed bit for bit", function()
  local steps = 90
  local began = ty.system.clock()
  check.equal(os.execute(child(root .. "/straight", steps, root .. "/straight.safetensors")), true, "runs through")
  local whole = ty.system.clock() - began
  local seed = os.time()
  math.randomseed(seed)
  local checkpoint, result = root .. "/killed", root .. "/killed.safetensors"
  local kills, attempts = 0, 0
  while not ty.io.exists(result) and attempts < 60 do
    attempts = attempts + 1
    local pid_file = root .. "/pid"
    os.execute(("%s >/dev/null 2>&1 & echo $! > %s"):format(child(checkpoint, steps, result), quote(pid_file)))
    local pid = math.tointeger(tonumber((ty.io.read(pid_file):match "%d+")))
    -- A part of what a whole run takes, growing so that there is progress however slow the start is.
    ty.system.sleep(whole * (0.1 + 0.3 * math.random()) * (1 + attempts / 10))
    if os.execute(("kill -9 %d 2>/dev/null"):format(pid)) then kills = kills + 1 end
    ty.system.sleep(0.02)
    if train.has_checkpoint(checkpoint) then -- whole at any moment
      local values = train.load_checkpoint(checkpoint, {}, { rng = false })
      check.equal(#values.history, values.step)
    end
  end
  check.equal(ty.io.exists(result), true, ("finished after %d attempts (seed %d)"):format(attempts, seed))
  check.equal(kills >= 1, true, ("%d kills (seed %d)"):format(kills, seed))
  local a, b = ty.io.load_safetensors(root .. "/straight.safetensors"), ty.io.load_safetensors(result)
  local names = 0
  for name, tensor in pairs(a) do
    names = names + 1
    check.equal(ty.io.to_bytes(b[name]) == ty.io.to_bytes(tensor), true, name .. " has the same bytes")
  end
  check.equal(names, 9)
end)

check.test("kept: trained where there is no file, read where there is one", function()
  local path, times = root .. "/deep/folder/kept.safetensors", 0
  local function taught(model)
    times = times + 1
    local other = model:clone() -- an average, say
    other.weight:detach():fill_(7)
    return other
  end
  local first = ty.train.kept(path, ty.nn.Linear(2, 1), taught)
  local fresh = ty.nn.Linear(2, 1)
  local second = ty.train.kept(path, fresh, taught)
  check.equal({ times, first.training, second.training, rawequal(second, fresh) }, { 1, false, false, true })
  check.equal({ first.weight:tolist(), second.weight:tolist() }, { { { 7, 7 } }, { { 7, 7 } } })
  check.equal(second.bias:tolist(), first.bias:tolist())
  check.fails(function() ty.train.kept(root .. "/none.safetensors", fresh, function() end) end,
    "train.kept: train(model): expected a module, got nil")
  check.equal(ty.io.exists(root .. "/none.safetensors"), false)
  check.fails(function() ty.train.kept(path, 3, taught) end, "train.kept: model: expected a module, got 3")
end)

remove_all(root)
check.test("minimize: a short loop, its mean of the last tenth, a scope a step", function()
  local x, seen = ty.tensor({ 4.0 }):requires_grad_(), {}
  local opt = ty.optim.SGD({ x }, { lr = 0.25 })
  local last = ty.train.minimize(opt, 20, function() return (x * x):sum() end,
    function(step, value) seen[step] = value end)
  check.equal(#seen, 20)
  check.close(seen[1], 16)
  check.close(seen[2], 4) -- x halves at every step
  check.close(last, (seen[19] + seen[20]) / 2, 1e-12)
  check.ok(ty.train.minimize(opt, 0, function() end) ~= ty.train.minimize(opt, 0, function() end), "nan of no steps")
  check.fails(function() ty.train.minimize(opt, 1, function() return 1 end) end,
    "train.minimize: loss: expected it to give a tensor, got 1")
  check.fails(function() ty.train.minimize({}, 1, function() end) end,
    "train.minimize: optimizer: expected one of ty.optim")
  check.fails(function() ty.train.minimize(opt, -1, function() end) end,
    "train.minimize: steps: expected an integer >= 0")
end)

check.test("rounds: each position once before any comes again, by the seed alone", function()
  local function drawn()
    ty.manual_seed(3)
    local next_places, all = ty.data.rounds(7, 3), {}
    for _ = 1, 7 do
      local list = next_places()
      check.equal(#list, 3)
      table.move(list, 1, 3, #all + 1, all)
    end
    return all
  end
  local all = drawn()
  check.equal(all, drawn())
  for round = 0, 2 do
    local part = table.move(all, 7 * round + 1, 7 * round + 7, 1, {})
    table.sort(part)
    check.equal(part, { 0, 1, 2, 3, 4, 5, 6 })
  end
  check.fails(function() ty.data.rounds(0, 1) end, "data.rounds: count: expected an integer >= 1, got 0")
end)

check.test("rounds from the end, and without what is left of an order; batches of a dataset without end", function()
  local function orders(count)
    ty.manual_seed(8)
    local list = {}
    for k = 1, count do list[k] = ty.randperm(7):tolist() end
    return list
  end
  local want = orders(2)
  ty.manual_seed(8)
  local back = ty.data.rounds(7, 3, { backward = true })
  check.equal({ back(), back(), back() }, { { want[1][7], want[1][6], want[1][5] },
    { want[1][4], want[1][3], want[1][2] }, { want[1][1], want[2][7], want[2][6] } })
  ty.manual_seed(8)
  local whole = ty.data.rounds(7, 3, { drop_last = true })
  check.equal({ whole(), whole(), whole() }, { table.move(want[1], 1, 3, 1, {}), table.move(want[1], 4, 6, 1, {}),
    table.move(want[2], 1, 3, 1, {}) })
  local set = ty.data.TensorDataset { x = ty.arange(7) * 10 }
  ty.manual_seed(8)
  local draw = ty.data.draws(set, 3, { drop_last = true, backward = true })
  check.equal(draw().x:tolist(), { 10 * want[1][7], 10 * want[1][6], 10 * want[1][5] })
  local all = ty.data.batches(set, { batch_size = 4 })
  check.equal({ #all, all[1].x:tolist(), all[2].x:tolist() }, { 2, { 0, 10, 20, 30 }, { 40, 50, 60 } })
  check.fails(function() ty.data.rounds(2, 3, { drop_last = true }) end,
    "data.rounds: batch: expected at most the 2 positions that there are, got 3")
  check.fails(function() ty.data.draws(3, 1) end, "data.draws: dataset: expected")
  check.fails(function() ty.data.batches(3) end, "data.batches: dataset: expected")
end)

check.test("evaluate: the mean over the items of all batches, of one number or several", function()
  local batches = { { x = ty.tensor { 1.0, 2 }, n = 2 }, { x = ty.tensor { 6.0 }, n = 1 } }
  check.equal(ty.train.evaluate(batches, function(b) return b.x:sum(), b.n end), 3.0)
  check.equal(ty.train.evaluate(batches, function(b) return b.x:sum():item() end), 4.5, "a batch counts as one")
  local graph = false
  local found = ty.train.evaluate(batches, function(b)
    graph = graph or ty.is_grad_enabled()
    return { sum = b.x:sum(), twice = 2 * b.x:sum():item() }, b.n
  end)
  check.equal({ found, graph }, { { sum = 3.0, twice = 6.0 }, false })
  check.fails(function() ty.train.evaluate({}, print) end, "train.evaluate: batches: expected at least one, got none")
  check.fails(function() ty.train.evaluate({ 1 }, function() return "x" end) end,
    "train.evaluate: what fn gives: expected a number")
end)

check.finish()
