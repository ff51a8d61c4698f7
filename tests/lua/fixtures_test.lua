-- Ops against results and gradients that PyTorch computed: tests/fixtures/ops_torch.json, made by make_ops.py.

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local ty = require "tycho"

-- The file holds numbers, short strings, lists and objects: as a Lua expression it is one substitution per bracket.
local function read(path)
  local text = assert(io.open(path)):read("a")
  text = text:gsub("%[", "{"):gsub("%]", "}"):gsub('"([%w_]+)":', '["%1"]='):gsub("null", "nil")
  return assert(load("return " .. text, "=" .. path, "t", {}))()
end

local SPECIAL = { nan = 0 / 0, inf = math.huge, ["-inf"] = -math.huge }

local function values(packed)
  local list = {}
  for i, v in ipairs(packed.data) do list[i] = SPECIAL[v] or v end
  return list
end

local function tensor(packed, dtype)
  local t = ty.tensor(values(packed), { dtype = packed.dtype == "f64" and dtype or packed.dtype }):reshape(packed.shape)
  return t
end

local function flat(t)
  local list = t:reshape(-1):tolist()
  for i, v in ipairs(list) do
    if type(v) == "boolean" then list[i] = v and 1 or 0 end
  end
  return list
end

local fixtures = read(check.root .. "tests/fixtures/ops_torch.json")

local function compare(got, packed, tolerance, what)
  check.equal(got.shape, packed.shape, what .. " shape")
  local want = values(packed)
  local scale = 1
  for _, v in ipairs(want) do
    if v == v and math.abs(v) < math.huge then scale = math.max(scale, math.abs(v)) end
  end
  check.close(flat(got), want, tolerance * scale, what)
end

local function run(case, dtype, tolerance)
  local leaves = {}
  local function argument(a)
    if a.tensor then
      local t = tensor(a.tensor, dtype)
      if case.grads and a.tensor.dtype == "f64" then
        t:requires_grad_()
        leaves[#leaves + 1] = t
      end
      return t
    elseif a.tensors then
      local list = {}
      for i, p in ipairs(a.tensors) do list[i] = argument { tensor = p } end
      return list
    end
    return a.value
  end
  local args = {}
  for i, a in ipairs(case.args) do args[i] = argument(a) end
  local opts = {}
  for name, a in pairs(case.opts) do opts[name] = a.tensor and tensor(a.tensor, dtype) or a.value end
  local n = #case.args
  if next(opts) then
    n = n + 1
    args[n] = opts
  end
  local results = table.pack(ty[case.op](table.unpack(args, 1, n)))
  check.equal(results.n, #case.results, case.op .. " results")
  for i, packed in ipairs(case.results) do
    if packed.dtype ~= "f64" then check.equal(flat(results[i]), values(packed), case.op .. " result " .. i)
    else compare(results[i], packed, tolerance, case.op .. " result " .. i) end
  end
  if not case.grads then return end
  local loss
  for i, w in ipairs(case.weights) do
    if w.data then
      local part = (results[i] * tensor(w, dtype)):sum()
      loss = loss and loss + part or part
    end
  end
  loss:backward()
  for i, packed in ipairs(case.grads) do
    local g = leaves[i].grad or ty.zeros_like(leaves[i])
    compare(g, packed, tolerance * 5, case.op .. " gradient " .. i)
  end
end

for i, case in ipairs(fixtures.cases) do
  check.test(case.op .. " (" .. i .. ") f64", function() run(case, "f64", 1e-9) end)
  check.test(case.op .. " (" .. i .. ") f32", function() run(case, "f32", 3e-6) end)
end

check.test("batch_norm in training", function()
  local b = fixtures.batch_norm
  local function t(name) return tensor(b[name], "f64") end
  local x, weight, bias = t("x"):requires_grad_(), t("weight"):requires_grad_(), t("bias"):requires_grad_()
  local mean, var = t("mean"), t("var")
  local y = ty.batch_norm(x, mean, var, weight, bias, { training = true, momentum = 0.2 })
  compare(y, b.out, 1e-9, "result")
  compare(mean, b.new_mean, 1e-9, "running mean")
  compare(var, b.new_var, 1e-9, "running variance")
  local loss = (y * t("w")):sum()
  loss:backward()
  compare(x.grad, b.gx, 1e-9, "gradient of x")
  compare(weight.grad, b.gweight, 1e-9, "gradient of weight")
  compare(bias.grad, b.gbias, 1e-9, "gradient of bias")
  compare(ty.batch_norm(t("x"), t("mean"), t("var"), t("weight"), t("bias")), b.eval, 1e-9, "evaluation")
end)

for i, o in ipairs(fixtures.optimizers) do
  check.test("optimizer step " .. o.name .. " (" .. i .. ")", function()
    local p = tensor(o.start, "f64")
    local function zeros() return ty.zeros_like(p) end
    local first, second = { zeros() }, { zeros() }
    for step, g in ipairs(o.grads) do
      local grads = { tensor(g, "f64") }
      local opts = { step = step, weight_decay = o.opts.weight_decay }
      if o.name == "sgd" then
        opts.momentum, opts.dampening, opts.nesterov = o.opts.momentum, o.opts.dampening, o.opts.nesterov
        ty.sgd_({ p }, grads, o.opts.momentum and first or {}, {}, o.opts.lr, opts)
      else
        opts.beta1, opts.beta2, opts.eps = o.opts.beta1, o.opts.beta2, o.opts.eps
        opts.decoupled = o.name == "adamw"
        ty.adam_({ p }, grads, first, second, {}, o.opts.lr, opts)
      end
    end
    compare(p, o["end"], 1e-9, "parameter after " .. #o.grads .. " steps")
  end)
end

check.finish()
