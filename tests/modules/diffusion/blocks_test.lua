-- Blocks of networks, left out and replaced from outside.
local here = (arg and arg[0]:match ".*/" or "tests/modules/diffusion/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local diffusion, hub = require "tycho.diffusion", require "tycho.hub"

local root = check.root .. "tests/fixtures/diffusers/"

-- Weights that are 0 at the start would hide what blocks do.
local function shaken(model)
  ty.no_grad(function()
    for _, p in ipairs(model:parameters()) do p:add_(ty.randn_like(p) * 0.1) end
  end)
  return model:eval()
end

local function text(n, embeddings, pooled)
  return { text = { embeddings = ty.randn(n, 5, embeddings), pooled = pooled and ty.randn(n, pooled) } }
end

ty.manual_seed(3)
local sd3, unet = hub.load(root .. "sd3", { dtype = "f32" }), hub.load(root .. "unet_sd1", { dtype = "f32" })
local networks = {
  dit = { shaken(diffusion.DiT { depth = 5, width = 32 }), ty.randn(2, 1, 8, 8), { labels = ty.tensor { 1, 4 } } },
  sd3 = { shaken(sd3), ty.randn(2, sd3.config.in_channels, 8, 8),
    text(2, sd3.config.joint_attention_dim, sd3.config.pooled_projection_dim) },
  unet = { shaken(unet), ty.randn(2, unet.in_channels, 8, 8), text(2, unet.context) },
}
local t = ty.tensor { 500.0, 20.0 }

local function run(network) return ty.no_grad(function() return network[1](network[2], t, network[3]) end) end

check.test("without orders, and with blocks that are run by a function, the same bits", function()
  for name, network in pairs(networks) do
    local plain = run(network)
    local blocks = diffusion.blocks(network[1])
    check.equal(run(network):tolist(), plain:tolist(), name)
    local seen = {}
    for i, block in ipairs(blocks.names) do
      blocks:replace(i, block, function(next, call, ...)
        seen[#seen + 1] = block
        check.equal(next ~= nil and call, {})
        return next(...)
      end)
    end
    check.equal(run(network):tolist(), plain:tolist(), name)
    check.equal(seen, blocks.names, name .. ": in the order that they run in")
    blocks:clear()
    if name ~= "unet" then
      blocks:replace(2, #blocks.names, function(next, _, ...) return next(...) end)
      check.equal(run(network):tolist(), plain:tolist(), name .. ": a range")
    end
    blocks:remove()
    check.equal(run(network):tolist(), plain:tolist(), name)
    check.equal(diffusion.blocks(network[1]):remove(), nil)
  end
end)

check.test("a block that is left out is the identity", function()
  for name, network in pairs(networks) do
    local model = network[1]
    local blocks = diffusion.blocks(model)
    local all = {}
    for i, block in ipairs(blocks.names) do all[i] = block end
    for _, list in ipairs { { 1 }, { blocks.names[2] }, all } do
      blocks:clear():skip(list)
      local skipped = run(network)
      blocks:clear()
      -- The same with the blocks' forward() of a function that gives its input back.
      for _, which in ipairs(list) do
        blocks:replace(which, which, function(_, _, x, ...)
          local module = model:get(type(which) == "string" and which or blocks.names[which])
          if rawget(module, "conv_shortcut") then x = module.conv_shortcut(x) end
          return x, ...
        end)
      end
      check.equal(run(network):tolist(), skipped:tolist(), name)
    end
    blocks:clear()
    check.ok(run(network):ne(ty.no_grad(function()
      blocks:skip { 2 }
      return run(network)
    end)):any():item(), name .. ": and that matters")
    blocks:remove()
  end
end)

check.test("a range that is left out is a shorter network", function()
  local model, x, condition = networks.dit[1], networks.dit[2], networks.dit[3]
  local blocks = diffusion.blocks(model)
  blocks:replace("blocks.1", "blocks.3", function(_, _, y) return y end)
  local y = run { model, x, condition }
  blocks:remove()
  local short = diffusion.DiT { depth = 2, width = 32 }:eval()
  local state, own = model:state_dict(), {}
  for name in pairs(short:state_dict()) do own[name] = state[name:gsub("^blocks%.1%.", "blocks.4.")] end
  short:load_state_dict(own)
  check.equal(run({ short, x, condition }):tolist(), y:tolist())
end)

local schedule = diffusion.schedule.flow()

local function sample(model, parts, guidance, seeds)
  local labels = {}
  for i, seed in ipairs(seeds) do labels[i] = seed % 10 end
  return diffusion.Sampler { schedule = schedule, predict = "flow", solver = diffusion.solver.euler(), steps = 6,
    guidance = guidance, parts = parts }:sample(model, { #seeds, 1, 8, 8 }, { seeds = seeds,
    condition = { labels = ty.tensor(labels) } })
end

-- Runs the blocks 2 to 4 every n-th step, else adds what they added then.
local function every(blocks, n)
  return blocks:part(function(call)
    return { replace = { { 2, 4, function(next, own, x, ...)
      check.ok(own == call)
      local change = (call.run.step - 1) % n ~= 0 and own.memory:get("change", own.branches)
      if change then return x + change end
      local y = next(x, ...)
      own.memory:put("change", own.branches, y - x)
      return y
    end } } }
  end)
end

check.test("a cache of what blocks add, by run, branch and sample", function()
  local model = networks.dit[1]
  local blocks = diffusion.blocks(model)
  local guidance = diffusion.guidance.classifier_free { scale = 3, interval = { 0.3, 4 } } -- branches come and go
  local plain = sample(model, {}, guidance, { 1, 2 })
  check.equal(sample(model, { every(blocks, 1) }, guidance, { 1, 2 }):tolist(), plain:tolist())
  local cached = sample(model, { every(blocks, 2) }, guidance, { 1, 2 })
  check.ok(cached:ne(plain):any():item())
  local part = every(blocks, 2)
  check.equal(sample(model, { part }, guidance, { 1, 2 }):tolist(), cached:tolist())
  check.equal(sample(model, { part }, guidance, { 1, 2 }):tolist(), cached:tolist(), "each run has a memory of its own")
  check.close(sample(model, { part }, guidance, { 2 }):tolist(), cached:narrow(0, 1, 1):tolist(), 1e-4)
  local all = {}
  local watch = blocks:part(function(call)
    all[#all + 1] = table.concat(call.branches, "+")
    return nil
  end)
  check.equal(sample(model, { watch }, guidance, { 1, 2 }):tolist(), plain:tolist())
  check.equal(all[1], "condition")
  check.equal(all[3], "condition+null")
  -- Blocks that add a constant: any cache is exact.
  ty.no_grad(function()
    for i = 2, 4 do
      local block = model.blocks[i]
      block.attn.proj.weight:zero_()
      block.mlp.fc2.weight:zero_()
      for name, weight in pairs(block.adaLN_modulation:state_dict()) do
        if name:find "weight$" then weight:zero_() end
      end
    end
  end)
  plain = sample(model, {}, guidance, { 1, 2 })
  for n = 1, 4 do
    check.close(sample(model, { every(blocks, n) }, guidance, { 1, 2 }):tolist(), plain:tolist(), 1e-5)
  end
  blocks:remove()
end)

check.test("memory of single samples", function()
  local model = networks.dit[1]
  local blocks, memory = diffusion.blocks(model), nil
  sample(model, { blocks:part(function(call) memory = call.memory end) }, nil, { 1 })
  blocks:remove()
  local a, b = ty.arange(8):to("f32"):reshape(4, 2), ty.zeros(4, 2)
  check.equal(memory:get("x", { "condition" }), nil)
  memory:put("x", { "condition", "null" }, a)
  check.equal(memory:get("x", { "null" }):tolist(), a:narrow(0, 2, 2):tolist())
  memory:put("x", { "null", "condition" }, b, ty.tensor { true, false, false, true })
  check.equal(memory:get("x", { "condition", "null" }):tolist(), { { 0, 1 }, { 0, 0 }, { 0, 0 }, { 6, 7 } })
  check.equal(memory:get("x", { "condition", "picture" }), nil)
end)

check.test("what is wrong is one clear error, and the network stays whole", function()
  local model = networks.dit[1]
  local plain = run(networks.dit)
  local blocks = diffusion.blocks(model)
  check.fails(function() diffusion.blocks(model) end,
    "diffusion.blocks: model: expected one whose blocks take no orders")
  check.fails(function() blocks:skip { 6 } end,
    "Blocks:skip: skip[1]: expected a number from 1 to 5 or a name such as 'blocks.0', got 6")
  check.fails(function() blocks:replace(3, 2, print) end, "Blocks:replace: last: expected a block that does not come")
  check.fails(function() blocks:replace(1, 3, print):replace(3, 4, print) end, "got blocks.2 twice")
  blocks:clear()
  check.fails(function() sample(diffusion.compiled(model), { every(blocks, 2) }, nil, { 1 }) end,
    "expected the sampler's network to be the one whose blocks these are")
  check.fails(function()
    sample(model, { blocks:part(function() return { replace = { { 1, 2, function() error "broken" end } } } end) }, nil,
      { 1 })
  end, "broken")
  check.equal(run(networks.dit):tolist(), plain:tolist())
  blocks:remove()
  check.fails(function() diffusion.blocks(ty.nn.Linear(2, 2)) end, "diffusion.blocks: model: expected a U-Net, a DiT")
  local of_unet = diffusion.blocks(networks.unet[1])
  check.fails(function() of_unet:replace(1, 2, print) end, "connections join the path between blocks of a U-Net")
  of_unet:remove()
end)

check.finish()
