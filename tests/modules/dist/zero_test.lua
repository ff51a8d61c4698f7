-- ZeRO: whatever ranks divide, they train as one rank does; what each holds and sends is what the paper says.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"

-- A network with parameters of the outermost module, a layer whose weight is used twice, at both ends, a frozen one,
-- and one that is not used. Makes it on a rank.
local function network()
  local t = require "tycho"
  local nn = t.nn
  local Net = nn.module()
  function Net:init()
    self.scale = nn.Parameter(t.full({ 6 }, 0.7))
    self.embed = nn.Embedding(11, 6)
    self.blocks = nn.ModuleList { nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)), nn.Linear(6, 6),
      nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)) }
    self.norm = nn.LayerNorm(6)
    self.unused = nn.Linear(2, 2)
  end
  function Net:forward(tokens)
    local x = self.embed(tokens)
    for _, block in ipairs(self.blocks) do x = x + block(x) end
    return self.norm(x) * self.scale:cos():matmul(t.ones({ 6 }, { dtype = x.dtype })) * self.scale
  end
  function Net:loss(tokens, labels)
    return t.cross_entropy(self(tokens):flatten(0, 1):matmul(self.embed.weight:t()), labels:flatten())
  end
  t.manual_seed(3)
  local net = Net()
  net.blocks[2].weight:requires_grad_(false)
  return net
end

local function batch(step, first, count)
  local places = ty.arange(count * 4):reshape(count, 4) + (first * 4 + 7 * step)
  return (places * 5 % 11):to "i64", (places * places % 11):to "i64"
end

-- Losses of steps and parameters afterwards, by ranks together or, with stage nil, by one as usual.
local function train(group, stage, dtype, clip, steps)
  local t, d = require "tycho", require "tycho.dist"
  local net = network():to(dtype)
  local function make(list) return t.optim.AdamW(list, { lr = 0.02, weight_decay = 0.1 }) end
  local share, losses, out = 12 // group.size, {}, { norms = {} }
  local engine, optimizer
  if stage then
    engine = d.zero(group, net, { stage = stage, optimizer = make, bucket = 300, clip_norm = clip })
  else
    local list = {}
    for _, p in ipairs(net:parameters()) do
      if p.requires_grad then
        p:set_grad(t.zeros_like(p)) -- what is not used decays as well
        list[#list + 1] = p
      end
    end
    optimizer = make(list)
  end
  for step = 1, steps do
    local tokens, labels = batch(step, share * group.rank, share)
    if engine then
      losses[step], out.norms[step] = engine:step(function() return net:loss(tokens, labels) end)
      losses[step] = group:all_reduce(t.tensor(losses[step], { dtype = "f64" }), "mean"):item()
    else
      for _, p in ipairs(net:parameters()) do if p.grad then p.grad:zero_() end end
      local loss = net:loss(tokens, labels)
      loss:backward()
      if clip > 0 then out.norms[step] = t.optim.clip_grad_norm(net, clip) end
      optimizer:step()
      losses[step] = loss:item()
    end
  end
  local tokens, labels = batch(0, 0, 12)
  out.after = t.no_grad(function() return net:loss(tokens, labels):item() end)
  if engine then engine:close() end
  out.losses, out.state = losses, {}
  for name, p in net:named_parameters() do out.state[name] = p:detach():to("f64"):flatten():tolist() end
  out.still = t.no_grad(function() return net:loss(tokens, labels):item() end)
  return out
end

for _, dtype in ipairs { "f64", "f32" } do
  check.test("as one rank trains, " .. dtype, function()
    local tolerance = dtype == "f64" and 1e-12 or 2e-6
    for _, clip in ipairs { 0, 0.5 } do
      local want = dist.run(1, train, nil, nil, dtype, clip, 5)[1]
      check.equal(want.losses[5] < want.losses[1] - 0.05, true, "it learns")
      for _, ranks in ipairs(clip == 0 and { 1, 2, 3, 4 } or { 3 }) do
        for stage = 0, 3 do
          local got = dist.run(ranks, train, nil, stage, dtype, clip, 5)
          for rank, out in ipairs(got) do
            local where = ("stage %d, rank %d of %d"):format(stage, rank - 1, ranks)
            check.close(out.losses, want.losses, tolerance, where)
            if clip > 0 then check.close(out.norms, want.norms, tolerance, where) end
            for name, values in pairs(want.state) do check.close(out.state[name], values, tolerance, where .. name) end
            check.close(out.after, want.after, tolerance, where)
            check.close(out.still, want.after, tolerance, where)
          end
        end
      end
    end
  end)
end

check.finish()
