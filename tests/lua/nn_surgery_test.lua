-- Changing the layers of a model: which are found, weights as rows, wrappers that go on and come off in any order.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn = ty.nn
local surgery = nn.surgery

-- GPT-2's way round: x [..., inputs] times weight [inputs, outputs].
local Turned = nn.module "Turned"
Turned.fan_in_fan_out = true
function Turned:init(inputs, outputs) self.weight = nn.Parameter(ty.randn(inputs, outputs)) end
function Turned:forward(x) return ty.matmul(x, self.weight) end

local Narrow = nn.module("Narrow", nn.Linear)

local Block = nn.module "Block"
function Block:init()
  self.q_proj = nn.Linear(4, 6)
  self.mlp = nn.Sequential(Turned(6, 3), nn.ReLU(), Narrow(3, 4))
  self.conv = nn.Conv1d(4, 4, 3)
  self.norm = nn.LayerNorm(4)
end
function Block:forward(x) return self.mlp(self.q_proj(x)) end

local Model = nn.module "Model"
function Model:init()
  self.embed = nn.Embedding(10, 4)
  self.blocks = nn.ModuleList { Block(), Block() }
  self.shared = self.blocks[1].q_proj
  self.lm_head = nn.Linear(4, 10)
end
function Model:forward(tokens)
  local x = self.embed(tokens)
  for _, block in ipairs(self.blocks) do x = block(x) end
  return self.lm_head(x)
end

local function near(a, b, tol, what) check.close(a:tolist(), b:tolist(), tol, what) end

local function names(list)
  local result = {}
  for i, layer in ipairs(list) do result[i] = layer.name end
  return table.concat(result, " ")
end

check.test("kinds", function()
  local want = { { nn.Linear(2, 3), "linear" }, { Narrow(2, 3), "linear" }, { Turned(2, 3), "linear" },
    { nn.Embedding(2, 3), "embedding" }, { nn.Conv1d(2, 3, 1), "conv" }, { nn.Conv2d(2, 3, 1), "conv" },
    { nn.ConvTranspose2d(2, 3, 1), "conv_transpose" } }
  for _, case in ipairs(want) do check.equal(surgery.kind(case[1]), case[2], getmetatable(case[1]).__name) end
  check.equal(surgery.kind(nn.LayerNorm(2)), nil)
  check.equal(surgery.kind(nn.Sequential(nn.Linear(2, 2))), nil)
end)

check.test("layers by kind, pattern, list, function; each module once", function()
  local model = Model()
  local function found(options) return names(surgery.find("test", model, options)) end
  local first, second = "blocks.0.q_proj blocks.0.mlp.0 blocks.0.mlp.2", "blocks.1.q_proj blocks.1.mlp.0 blocks.1.mlp.2"
  check.equal(found(), first .. " " .. second .. " lm_head")
  check.equal(found { head = false }, first .. " " .. second)
  check.equal(found { kinds = { "conv", "embedding" } }, "embed blocks.0.conv blocks.1.conv")
  check.equal(found { targets = "^blocks%.1" }, second)
  check.equal(found { targets = { "q_proj", "blocks.1.mlp.2" } }, "blocks.0.q_proj blocks.1.q_proj blocks.1.mlp.2")
  check.equal(found { targets = { "^lm_head" } }, "lm_head")
  check.equal(found { targets = function(name, module) return module.bias == nil end }, "blocks.0.mlp.0 blocks.1.mlp.0")
  check.equal(found { skip = { "lm_head", "0.q_proj", "mlp.0" }, targets = "[jd0-9]$" },
    "blocks.0.mlp.2 blocks.1.q_proj blocks.1.mlp.2")
  check.equal(found { targets = "nothing" }, "")
  check.equal(surgery.find("test", model, { kinds = { "conv" } })[1].kind, "conv")
  check.ok(rawequal(surgery.find("test", model)[1].module, model.shared), "the module, under its first name")
end)

check.test("mistakes are named", function()
  local model = Model()
  local function found(options, text)
    check.fails(function() surgery.find("prune.it", model, options) end, text)
  end
  check.fails(function() surgery.find("prune.it", 3) end, "prune.it: model: expected a module, got 3")
  found({ targets = { "v_proj" } }, "targets: no module is named 'v_proj'; there are embed, blocks, q_proj, mlp")
  found({ targets = {} }, "prune.it: targets: expected a list of names, got an empty one")
  found({ targets = { 3 } }, "targets: expected a list of names, which holds 3")
  found({ targets = 3 }, "targets: expected a pattern, a list of names or a function, got 3")
  found({ skip = "lm_head" }, 'skip: expected a list of strings, got "lm_head"')
  found({ kind = {} }, "prune.it: no option 'kind'")
  check.fails(function() surgery.find("prune.it", nn.Linear(2, 2), { targets = { "x" } }) end, "it is a single Linear")
  check.fails(function() surgery.rows(nn.ReLU()) end,
    "surgery.rows: module: expected a layer (linear, conv, conv_transpose or embedding), got a module ReLU")
  check.fails(function() surgery.laid_out(nn.Linear(2, 2), ty.zeros(3)) end, "rows: expected 4 elements, got a tensor")
  check.fails(function() surgery.exchange(model, "nothing", ty.zeros(3)) end, "name: expected one of a tensor")
  check.fails(function() surgery.finish(ty.zeros(3), nil, "sine") end, 'activation: expected "none" or "relu"')
  check.fails(function() surgery.wrapper { name = "X", field = "_x" } end, "forward: expected a function, got nil")
end)

-- What a layer computes is its rows times the columns of its input.
check.test("rows, and back", function()
  local x = ty.randn(5, 4)
  for _, layer in ipairs { nn.Linear(4, 3, { bias = false }), Turned(4, 3) } do
    local rows = surgery.rows(layer)
    check.equal({ rows.shape, { surgery.sizes(layer) } }, { { 3, 4 }, { 4, 3 } })
    near(ty.matmul(x, rows:transpose(0, 1)), layer(x), 1e-6)
    check.equal(surgery.laid_out(layer, rows):tolist(), layer.weight:tolist())
    local mask = surgery.laid_out(layer, rows:gt(0))
    check.equal(mask:tolist(), layer.weight:gt(0):tolist(), "a mask lies as the weight does")
    check.equal(surgery.rows(layer, mask):tolist(), rows:gt(0):tolist())
  end
  local embedding = nn.Embedding(6, 2)
  check.equal({ surgery.rows(embedding):tolist(), { surgery.sizes(embedding) } },
    { embedding.weight:tolist(), { 6, 2 } })
  local conv = nn.Conv2d(4, 6, { 2, 3 }, { groups = 2, bias = false })
  check.equal({ surgery.rows(conv).shape, { surgery.sizes(conv) } }, { { 6, 12 }, { 12, 6 } })
  local image = ty.randn(1, 4, 2, 3)
  for group = 0, 1 do
    local patch = image:narrow(1, 2 * group, 2):flatten()
    near(ty.matmul(surgery.rows(conv):narrow(0, 3 * group, 3), patch),
      conv(image):flatten():narrow(0, 3 * group, 3), 1e-5)
  end
  check.equal(surgery.laid_out(conv, surgery.rows(conv)):tolist(), conv.weight:tolist())
  -- A single input pixel: each output channel gets its row times the channels of its group.
  local back = nn.ConvTranspose2d(4, 6, 1, { groups = 2, bias = false })
  local pixel, rows = ty.randn(1, 4, 1, 1), surgery.rows(back)
  check.equal({ rows.shape, { surgery.sizes(back) } }, { { 6, 2 }, { 2, 6 } })
  for group = 0, 1 do
    near(ty.matmul(rows:narrow(0, 3 * group, 3), pixel:flatten():narrow(0, 2 * group, 2)),
      back(pixel):flatten():narrow(0, 3 * group, 3), 1e-5)
  end
  check.equal(surgery.laid_out(back, rows):tolist(), back.weight:tolist())
  local codes = nn.Linear(64, 3)
  surgery.exchange(codes, "weight", codes.weight:detach():to "q8_0")
  check.equal({ surgery.rows(codes).dtype, { surgery.sizes(codes) } }, { "q8_0", { 64, 3 } })
end)

check.test("finish does what nn.Linear does after its product", function()
  local layer, x, r = nn.Linear(4, 3), ty.randn(2, 4), ty.randn(2, 3)
  for _, name in ipairs { "none", "relu", "gelu", "gelu_tanh", "silu" } do
    near(surgery.finish(layer(x), r, name), layer(x, r, name), 1e-6, name)
  end
  check.equal(surgery.finish(x):tolist(), x:tolist())
end)

check.test("fields: another tensor in the same place, and none", function()
  local model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
  local old = model[1].weight
  local new = ty.zeros(3, 2):requires_grad_()
  check.ok(rawequal(surgery.exchange(model[1], "weight", new), old))
  local order = {}
  for name, p in model:named_parameters() do order[#order + 1] = name .. (rawequal(p, new) and "!" or "") end
  check.equal(order, { "0.weight!", "0.bias", "1.weight", "1.bias" })
  surgery.remove(model[1], "bias")
  surgery.remove(model[1], "bias")
  check.equal(#model:parameters(), 3)
  model[1].bias = nn.Parameter(ty.ones(3))
  check.equal({ #model:parameters(), model(ty.zeros(1, 2)).shape }, { 4, { 1, 2 } }, "it can be put there again")
end)

local function scaled(name, field)
  return surgery.wrapper { name = name, field = field, fields = { field .. "_gain", field .. "_layer" },
    forward = function(base, kind)
      return function(self, ...)
        return base.forward(self, ...) * (self[field].factor * (kind == "linear" and 1 or 10))
      end
    end,
    describe = function(state) return ("times %d"):format(state.factor) end }
end

check.test("wrappers go on and come off in any order", function()
  local double, triple = scaled("Double", "_double"), scaled("Triple", "_triple")
  local x = ty.randn(2, 4)
  for _, order in ipairs { { double, triple }, { triple, double } } do
    local layer = Narrow(4, 3)
    local plain, class, weight = layer(x):detach(), getmetatable(layer), layer.weight
    double:wrap(layer, { factor = 2 })
    near(layer(x), plain * 2, 1e-6)
    triple:wrap(layer, { factor = 3 })
    near(layer(x), plain * 6, 1e-6)
    check.equal({ getmetatable(layer).__name, surgery.kind(layer), layer:describe() },
      { "TripleDoubleNarrow", "linear", "4, 3, times 2, times 3" })
    check.ok(rawequal(layer.weight, weight), "the same object with the same weights")
    check.fails(function() double:wrap(layer, {}) end, "Double: the layer (TripleDoubleNarrow) is wrapped already")
    order[1]:unwrap(layer)
    near(layer(x), plain * (order[1] == double and 3 or 2), 1e-6)
    check.equal(order[1]:state(layer), nil)
    order[2]:unwrap(layer)
    near(layer(x), plain, 1e-6)
    check.ok(rawequal(getmetatable(layer), class), "its class again")
    check.fails(function() order[2]:unwrap(layer) end, "(Narrow) is not wrapped")
  end
  local embedding, index = nn.Embedding(5, 2), ty.tensor({ 1, 3 }, { dtype = "i64" })
  local plain = embedding(index):detach()
  near(double:wrap(embedding, { factor = 2 })(index), plain * 20, 1e-6, "forward knows the kind")
end)

check.test("what a wrapper adds is its own: found by nobody, gone with it", function()
  local double, model = scaled("Double", "_double"), Model()
  local before, state = names(surgery.find("test", model)), {}
  for name in pairs(model:state_dict()) do state[#state + 1] = name end
  local tokens = ty.tensor({ { 1, 2 } }, { dtype = "i64" })
  local plain = model(tokens):detach()
  for _, layer in ipairs(surgery.find("test", model, { targets = "q_proj" })) do
    double:wrap(layer.module, { factor = 2 })
    layer.module._double_layer = nn.Sequential(nn.Linear(2, 2))
    layer.module._double_gain = nn.Parameter(ty.ones(1))
  end
  check.equal(names(double:wrapped("test", model)), "blocks.0.q_proj blocks.1.q_proj")
  check.equal(names(surgery.find("test", model)), before)
  check.equal(#model:parameters(), #state - 2 + 2 * 3, "the optimizer sees it; shared layers have two names")
  local copy = model:clone()
  near(copy(tokens), model(tokens), 0)
  for _, layer in ipairs(double:wrapped("test", copy)) do double:unwrap(layer.module) end
  near(copy(tokens), plain, 0, "a copy sheds its own")
  check.equal(#double:wrapped("test", model), 2)
  for _, layer in ipairs(double:wrapped("test", model)) do double:unwrap(layer.module) end
  local after = {}
  for name in pairs(model:state_dict()) do after[#after + 1] = name end
  table.sort(state)
  table.sort(after)
  check.equal(after, state)
end)

check.test("a compiled function sees a layer that was wrapped after it was recorded", function()
  local double, layer, x = scaled("Double", "_double"), nn.Linear(4, 3), ty.randn(2, 4)
  local step = ty.compile(function(input) return ty.no_grad(layer, input) end)
  local plain = step(x):clone()
  near(step(x), plain, 0)
  double:wrap(layer, { factor = 2 })
  near(step(x), plain * 2, 1e-6)
  double:unwrap(layer)
  near(step(x), plain, 1e-6)
end)

check.finish()
