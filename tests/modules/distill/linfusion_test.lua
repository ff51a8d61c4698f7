-- Linear attention in the place of softmax, and a student that has it.
local here = (arg and arg[0]:match ".*/" or "tests/modules/distill/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local diffusion, distill = require "tycho.diffusion", require "tycho.distill"

local function heads(n) return ty.randn(2, 3, n, 4, { dtype = "f64" }) end
local function far(a, b) return (a - b):abs():amax():item() end
local function shaken(model)
  ty.no_grad(function()
    for _, p in ipairs(model:parameters()) do p:add_(ty.randn_like(p) * 0.1) end
  end)
  return model:eval()
end

ty.manual_seed(2)
local t = ty.tensor { 500.0, 20.0 }
local labels = { labels = ty.tensor { 0, 0 } }
local networks = {
  unet = { shaken(diffusion.UNet { levels = { { channels = 16, attention = true },
    { channels = 16, attention = true } } }), {} },
  dit = { shaken(diffusion.DiT { size = 8, patch = 2, width = 16, depth = 2, classes = 0 }), labels },
}
local x = ty.randn(2, 1, 8, 8)

check.test("linear attention is the matrix of weights, whose rows sum to 1 without the constant", function()
  local q, k, v = heads(5), heads(7), heads(7)
  local function phi(z) return ty.where(z:gt(0), z + 1, z:exp()) end
  local weights = phi(q):matmul(phi(k):transpose(-2, -1)) / 7
  local sums = weights:sum(-1, true)
  check.close(far(distill.linear_attention(q, k, v), weights:matmul(v) / (sums + 1e-4)), 0, 1e-12)
  check.close(far(distill.linear_attention(q, k, v, false), weights:matmul(v)), 0, 1e-12)
  local ones = distill.linear_attention(q, k, ty.ones_like(v)) * ((sums + 1e-4) / sums)
  check.close(far(ones, ty.ones_like(ones)), 0, 1e-12)
end)

check.test("every token twice changes nothing, as in a picture of twice the size", function()
  local q, k, v = heads(5), heads(5), heads(5)
  local function twice(z) return z:repeat_interleave(2, 2) end
  local y = distill.linear_attention(q, k, v)
  check.close(far(distill.linear_attention(twice(q), twice(k), twice(v)), twice(y)), 0, 1e-12)
end)

check.test("gradients of linear attention", function()
  local q, k, v = heads(3):requires_grad_(), heads(3):requires_grad_(), heads(3):requires_grad_()
  local weight = heads(3)
  local function value() return (distill.linear_attention(q, k, v) * weight):sum() end
  local gradients = ty.grad(value(), { q, k, v })
  for i, z in ipairs { q, k, v } do
    local step = ty.randn_like(z) * 1e-6
    local before = value():item()
    ty.no_grad(function() z:add_(step) end)
    local change = value():item() - before
    ty.no_grad(function() z:sub_(step) end)
    check.close(change, (gradients[i] * step):sum():item(), 1e-9)
  end
end)

check.test("a student: the teacher's weights stand still, the f begin as nothing, and alone are trained", function()
  for name, network in pairs(networks) do
    local model, condition = network[1], network[2]
    local before = ty.no_grad(model, x, t, condition)
    local student = distill.linfusion(model)
    check.equal(ty.no_grad(model, x, t, condition):tolist(), before:tolist(), name)
    local trained = {}
    for parameter, p in pairs(student:state_dict()) do
      local own = model:state_dict()[parameter]
      if own then check.equal(p:tolist(), own:tolist(), parameter) end
    end
    for _, p in ipairs(student:parameters()) do
      if p.requires_grad then trained[#trained + 1] = p end
    end
    local sites = diffusion.attention.layers.find("test", student)
    check.equal(#trained, 12 * #sites, name)
    -- Nothing at first: the same as the teacher with its softmax exchanged.
    local replaced = diffusion.attention.replace(model, function(_, q, k, v)
      return distill.linear_attention(q, k, v)
    end)
    check.close(far(ty.no_grad(model, x, t, condition), ty.no_grad(student, x, t, condition)), 0, 1e-5, name)
    replaced:remove()
    check.equal(far(ty.no_grad(student, x, t, condition), before) > 1e-4, true)
  end
  check.fails(function() distill.linfusion(ty.nn.Linear(2, 2)) end, "expected a network with self-attention")
end)

check.test("the loss: its three parts by hand", function()
  local model, condition = table.unpack(networks.unet)
  local student, flow = distill.linfusion(model), diffusion.Flow()
  local parts = { student = student, teacher = distill.teacher(model:clone()) }
  local function loss(output, features)
    ty.manual_seed(4)
    return distill.linfusion_loss(flow, { output = output, features = features })(parts, { image = x })
  end
  local own, values = loss(0, 0)
  ty.manual_seed(4)
  check.close(own:item(), flow:loss(student, x, condition):item(), 1e-6)
  local all = loss(2, 3)
  check.close(all:item(), own:item() + 2 * values.teacher + 3 * values.features, 1e-6)
  local wanted = distill.watch(model, function() return ty.no_grad(model, x, t, condition) end)
  local found, y = distill.watch(student, function() return ty.no_grad(student, x, t, condition) end)
  check.equal({ #wanted, #found, #wanted > 0 }, { #wanted, #wanted, true })
  check.equal(y.shape, x.shape)
  all:backward()
  local moved = 0
  for _, p in ipairs(student:parameters()) do moved = moved + (p.grad and p.grad:abs():sum():item() or 0) end
  check.equal(moved > 0, true)
end)

check.test("the loss drops conditions as the student's network wants it", function()
  local model = networks.dit[1]
  local flow = diffusion.Flow()
  local loss = distill.linfusion_loss(flow, { read = function(batch) return batch.image, labels end })
  local own = loss({ student = distill.linfusion(model), teacher = distill.teacher(model:clone()) }, { image = x })
  check.equal(own:item() > 0, true)
end)

check.test("training brings the student nearer to its teacher", function()
  local model, condition = table.unpack(networks.unet)
  local student, teacher = distill.linfusion(model), distill.teacher(model:clone())
  local function gap()
    return ty.no_grad(student, x, t, condition):sub(teacher(x, t, condition)):square():mean():item()
  end
  local before, list = gap(), {}
  for _, p in ipairs(student:parameters()) do
    if p.requires_grad then list[#list + 1] = p end
  end
  local opt = ty.optim.AdamW(list, { lr = 3e-3 })
  for _ = 1, 30 do opt:step((student(x, t, condition) - teacher(x, t, condition)):square():mean()) end
  check.equal(gap() < 0.5 * before, true, ("%g of %g"):format(gap(), before))
end)

check.finish()
