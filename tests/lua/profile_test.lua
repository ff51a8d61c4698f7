-- ty.profile: which kernels ran, for which part of a model, and how much work was in them.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local nn = ty.nn

local known = { limits = { flops = 1e9, bandwidth = 1e8 } }
local function with(more)
  local options = { limits = known.limits }
  for key, value in pairs(more) do options[key] = value end
  return options
end

local function find(list, wanted)
  for _, event in ipairs(list) do
    local fits = true
    for key, value in pairs(wanted) do fits = fits and event[key] == value end
    if fits then return event end
  end
end

check.test("work of products, convolutions and attention is counted exactly", function()
  local x, y = ty.ones(6, 5), ty.ones(5, 7)
  local p, z, more = ty.profile(function() return x:matmul(y), "more" end, known)
  check.equal(z.shape, { 6, 7 })
  check.equal(more, "more")
  check.equal(#p.events, 1)
  local e = p.events[1]
  check.equal({ e.op, e.flops, e.bytes, e.shapes, e.backward, e.fused }, { "matmul", 2.0 * 6 * 5 * 7,
    4 * (6 * 5 + 5 * 7 + 6 * 7), "f32 [6, 5] [5, 7]", false, false })
  local image, weight = ty.ones(2, 4, 9, 9), ty.ones(6, 2, 3, 3)
  p = ty.profile(function() return image:conv2d(weight, { groups = 2, padding = 1 }) end, known)
  check.equal(find(p.events, { op = "conv2d" }).flops, 2.0 * (2 * 6 * 9 * 9) * (2 * 3 * 3))
  local q, k = ty.ones(2, 4, 5, 8), ty.ones(2, 2, 7, 8)
  p = ty.profile(function() return ty.scaled_dot_product_attention(q, k, k) end, known)
  check.equal(find(p.events, { op = "scaled_dot_product_attention" }).flops, 2 * 2.0 * (2 * 4) * 5 * 7 * 8)
  p = ty.profile(function() return ty.ones(1, 8):expand(100, 8) + 1 end, known)
  check.equal(find(p.events, { op = "add" }).bytes, 4 * (8 + 800)) -- what is repeated is read once
end)

local Net = nn.module "Net"
function Net:init()
  self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
end
function Net:forward(x) return self.second(self.first(x):relu()) end

check.test("kernels are those of modules, and of their backward passes", function()
  ty.manual_seed(1)
  local net, x = Net(), ty.randn(3, 8)
  local p = ty.profile(function() net(x):square():sum():backward() end, with { model = net })
  local function of(op, module, backward) return find(p.events, { op = op, module = module, backward = backward }) end
  check.equal(of("matmul", "first", false).flops, 2.0 * 3 * 8 * 16)
  check.equal(of("matmul", "second", false).flops, 2.0 * 3 * 16 * 4)
  check.ok(of("matmul", "first", true))
  check.ok(of("matmul", "second", true))
  check.ok(of("relu", "Net", false))
  check.ok(not of("square", "Net", false))
  check.ok(of("square", nil, false))
  local names = {}
  for _, call in ipairs(p.scopes) do
    names[#names + 1] = call.name
    check.ok(call.begin >= 0 and call.seconds >= 0 and call.begin + call.seconds <= p.seconds)
  end
  check.equal(names, { "first", "second", "Net" })
  check.equal(rawget(net, "_hooks"), false) -- the hooks are gone
  -- A node of an earlier profile has a number that means nothing in a later one.
  local y
  ty.profile(function() y = net(x):sum() end, with { model = net })
  local other = Net()
  p = ty.profile(function() y:backward() end, with { model = other })
  for _, e in ipairs(p.events) do check.equal(e.module, nil) end
end)

check.test("sums, shares of the limit, and a table of text", function()
  local x = ty.ones(10, 10)
  local p = ty.profile(function()
    for _ = 1, 3 do x:matmul(x) end
    x:exp()
  end, known)
  local sums = {}
  for _, sum in ipairs(p:sums()) do sums[sum.name] = sum end
  check.equal({ sums.matmul.calls, sums.matmul.flops, sums.matmul.bytes }, { 3, 6000.0, 3600 })
  check.close({ sums.matmul.limit }, { 3 * 1200 / 1e8 }, 1e-12) -- memory is the limit: 12 us against 2
  check.close({ sums.exp.limit }, { 800 / 1e8 }, 1e-12)
  check.close({ p:in_kernels() }, { sums.matmul.seconds + sums.exp.seconds }, 1e-12)
  check.ok(p:in_kernels() <= p.seconds)
  check.equal(#p:sums "shapes", 2)
  local text = tostring(p)
  for _, part in ipairs { "^op +calls", "matmul +3 ", "exp +1 ", "4 kernels" } do check.ok(text:find(part), part) end
  check.ok(p:table({ rows = 1 }):find "and 1 more")
end)

check.test("what is compiled is seen, loops of several ops as one", function()
  local f = ty.compile(function(x) return ((x * 2):exp() + 1):matmul(x) end)
  local x = ty.ones(512, 512)
  for _ = 1, 3 do f(x) end
  local p, y = ty.profile(function() return f(x) end, known)
  check.ok(find(p.events, { op = "matmul", fused = false }))
  check.ok(find(p.events, { fused = true }))
  check.close({ y[0][0]:item() }, { 512 * (math.exp(2) + 1) }, 0.1)
  check.equal(p:sums()[1].calls >= 1, true)
end)

check.test("a picture and a trace", function()
  local net, x = Net(), ty.randn(3, 8)
  local p = ty.profile(function() net(x):sum():backward() end, with { model = net })
  local path = scratch.file "flame.svg"
  check.equal(p:flame(path, { width = 20000 }), path) -- wide: parts that took little are drawn as well
  local svg = io.open(path):read "a"
  for _, part in ipairs { "^<svg", "<title>all: ", "<title>forward: ", "<title>backward: ", "<title>matmul: ",
    "</svg>\n$" } do
    check.ok(svg:find(part), part)
  end
  local _, opened = svg:gsub("<g>", "")
  local _, closed = svg:gsub("</g>", "")
  check.equal(opened, closed)
  path = scratch.file "trace.json"
  p:trace(path)
  local trace = ty.io.load_json(path)
  check.equal(#trace.traceEvents, #p.events + #p.scopes)
  for _, e in ipairs(trace.traceEvents) do
    check.equal(e.ph, "X")
    check.ok(e.ts >= 0 and e.dur >= 0)
  end
end)

check.test("errors pass, and end the profile", function()
  check.fails(function() ty.profile(function() error "mine" end, known) end, "mine")
  check.fails(function()
    ty.profile(function() ty.profile(function() end, known) end, known)
  end, "profile: this thread is being profiled already")
  local p = ty.profile(function() return ty.ones(3) + 1 end, known)
  check.ok(#p.events > 0)
  p = ty.profile(function() for _ = 1, 5 do ty.ones(3):exp() end end, with { most = 4 })
  check.equal(#p.events, 4)
  check.ok(p.lost >= 1 and tostring(p):find "more kernels were not kept")
  check.fails(function() ty.profile(3) end, "profile: fn: expected a function, got 3")
  check.fails(function() ty.profile(print, { model = 3 }) end, "profile: model: expected a module, got 3")
  check.fails(function() ty.profile(print, { limits = {} }) end,
    "profile: limits.flops: expected a number > 0, got nil")
  check.fails(function() p:sums "size" end, 'Profile:sums: by: expected "op" or "module" or "shapes", got "size"')
  check.fails(function() p:table { rows = 0 } end, "Profile:table: rows: expected an integer >= 1, got 0")
  check.fails(function() p:flame() end, "Profile:flame: path: expected a string, got nil")
end)

check.test("the first NaN is found, and where it began", function()
  local net, x, blame = Net(), ty.ones(3, 8), ty.profile.blame
  local found, y = blame(function() return net(x) end, { model = net })
  check.equal(found, nil)
  check.equal(y.shape, { 3, 4 })
  found = blame(function() return (net(x) * 0 - 1):sqrt():exp() end, { model = net })
  check.equal({ found.op, found.module, found.backward, found.given, found.shapes }, { "sqrt", nil, false, false,
    "f32 [3, 4]" })
  check.equal(tostring(found), "sqrt(f32 [3, 4]): the first NaN began there, with inputs that had none")
  -- A weight that is none: the layer's product is where it came in.
  ty.no_grad(function() net.second.weight[1][2]:fill_(0 / 0) end)
  found = blame(function() net(x) end, { model = net })
  check.equal({ found.op, found.module, found.given }, { "matmul", "second", true })
  check.ok(tostring(found):find " in second: the first NaN came in with its inputs")
  -- Only the gradient: of the square root at 0 by an infinite factor, which is 0 in the forward pass.
  local at = ty.zeros(2):requires_grad_()
  found = blame(function() (at:sqrt() * 0):sum():backward() end)
  check.equal({ found.backward, found.given }, { true, false })
  -- Infinities are looked for when they are wanted; what is written in place is not taken for what came in.
  local grow = function() ty.full({ 4 }, 1e30):mul_(1e30):add_(1) end
  check.equal(blame(grow), nil)
  found = blame(grow, { infinite = true })
  check.equal({ found.op, found.given }, { "mul", false })
  for _, dtype in ipairs { "f16", "bf16", "f64" } do
    check.equal(blame(function() ty.full({ 2, 3 }, -1, { dtype = dtype }):sqrt() end).op, "sqrt")
    check.equal(blame(function() ty.full({ 2, 3 }, 60000, { dtype = dtype }):exp() end, { infinite = true }).op, "exp")
  end
  -- Views with gaps: the NaN is in what the view leaves out.
  local wide = ty.ones(4, 6)
  wide[2][5]:fill_(0 / 0)
  check.equal(blame(function() return wide:narrow(1, 0, 5) + 1 end), nil)
  check.equal(blame(function() return wide:narrow(1, 1, 5) + 1 end).op, "add")
  check.fails(function() blame(1) end, "profile.blame: fn: expected a function, got 1")
end)

check.test("a model's shapes, parameters and work", function()
  local net = Net()
  local s = net:summary { 3, 8 }
  local rows = {}
  for _, row in ipairs(s.rows) do rows[row.name] = row end
  check.equal(#s.rows, 3)
  check.equal({ rows.first.shape, rows.second.shape, rows[""].shape }, { { 3, 16 }, { 3, 4 }, { 3, 4 } })
  check.equal({ rows.first.parameters, rows[""].parameters }, { 144, 144 + 68 })
  check.equal(rows.first.flops, 2.0 * 3 * 8 * 16)
  check.equal(rows[""].flops, 2.0 * 3 * 8 * 16 + 2.0 * 3 * 16 * 4 + 3 * 16) -- and one for each number of relu
  check.equal(s.activations, 4 * (3 * 16 + 3 * 4 + 3 * 4))
  check.ok(tostring(s):find "first: Linear +%[3, 16%] +144 +768")
  check.ok(tostring(s):find "212 parameters, 1,200 FLOPs forward")
  check.equal(#net:summary(ty.ones(2, 8), { depth = 0 }).rows, 1)
  check.equal(net:summary({ ty.ones(2, 8) }).rows[1].shape, { 2, 4 })
  local deep = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Linear(8, 8), Net()))
  s = deep:summary { 1, 8 }
  check.equal(deep.training, true)
  check.equal(s.rows[1].flops, 2.0 * 8 * 8 + 2 * 8 * 16 + 2 * 16 * 4 + 16)
  check.fails(function() net:summary "big" end, "Module:summary: inputs: expected a list of integers, got ")
  check.fails(function() net:summary {} end, "Module:summary: inputs: expected at least one, got none")
  check.fails(function() net:summary { 3, 9 } end, "linear: ")
  check.equal(rawget(net, "_hooks"), false)
end)

check.test("limits are measured once, and are above nothing", function()
  local limits = ty.profile.limits()
  check.ok(limits.flops > 1e8 and limits.bandwidth > 1e8)
  check.equal(rawequal(ty.profile.limits(), limits), true)
  check.equal(rawequal(ty.profile.limits { copy = true }, limits), false)
  -- Processor seconds of a processor that takes a 16th for whatever it does.
  local clock, now = os.clock, 0
  os.clock = function() -- luacheck: ignore 122
    now = now + 1 / 16
    return now
  end
  local read, copy = ty.profile.limits { processor = true }, ty.profile.limits { processor = true, copy = true }
  os.clock = clock -- luacheck: ignore 122
  check.equal({ read.flops, copy.flops }, { 32.0 * 640 ^ 3, 32.0 * 640 ^ 3 })
  check.equal({ read.bandwidth, copy.bandwidth }, { 64.0 * (1 << 24), 128.0 * (1 << 24) })
  check.fails(function() ty.profile.limits { copy = 1 } end, "profile.limits: copy: expected a boolean, got 1")
  check.fails(function() ty.profile.limits { write = true } end, "profile.limits: .*write")
end)

check.finish()
