-- Paged memory and moments of optimizers in it, on the CPU and, where there is one, on a GPU.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local optim = ty.optim

local function same(a, b) return a:eq(b):all():item() end

for _, device in ipairs(ty.cuda.count() > 0 and { "cpu", "cuda" } or { "cpu" }) do
  check.test("paged memory: " .. device, function()
    local x = ty.randn(40, 30):to(device):transpose(0, 1)
    local p = x:page_memory()
    check.equal(p:is_paged(), true)
    check.equal(x:is_paged(), false)
    check.equal(p.device, x.device)
    check.ok(same(p, x), "the values")
    check.equal(p:page_memory():is_paged(), true)
    check.equal(p["3:5"]:is_paged(), true)
    check.equal((p * 2):is_paged(), false)
    check.ok(same(p * 2, x * 2), "is computed with")
    p:fill_(3)
    check.equal(p:sum():item(), 3600.0)
    check.equal(ty.zeros(0):to(device):page_memory():tolist(), {})
    check.equal(ty.randn(3, 64):to("nf4"):page_memory():nbytes(), 111)
    local before = ty.memory.stats("paged").live
    if device == "cuda" then
      local y = ty.ones({ 1000 }, { device = device }):page_memory()
      check.equal(ty.memory.stats("paged").live - before, 4000)
      y:free()
      check.equal(ty.memory.stats("paged").live, before)
    end
  end)

  check.test("paged moments give the same numbers, bit for bit: " .. device, function()
    for _, make in ipairs { optim.Adam, optim.AdamW } do
      for _, bits in ipairs { 8, 32 } do
        local function run(paged, resumed)
          ty.manual_seed(5)
          local params = { ty.randn(64, 65):to(device):requires_grad_(), ty.randn(7):to(device):requires_grad_() }
          local function loss() return params[1]:square():square():mean() + params[2]:square():sum() end
          local opt = make(params, { lr = 0.05, bits = bits, paged = paged })
          for i = 1, 6 do
            if i == 4 and resumed ~= nil then
              local other = make(params, { lr = 0.05, bits = bits, paged = resumed })
              other:load_state_dict(opt:state_dict())
              opt = other
            end
            opt:step(loss())
          end
          local state = opt.state[params[1]]
          check.equal(state.exp_avg:is_paged(), resumed == nil and paged or resumed or false)
          check.equal(opt.state[params[2]].exp_avg:is_paged(), false, "small ones are not paged")
          check.equal(opt.groups[1].paged, resumed == nil and paged or resumed or false)
          return params, state
        end
        local want, state = run(false)
        for _, way in ipairs { { true }, { true, false }, { false, true } } do
          local got, other = run(way[1], way[2])
          for i = 1, 2 do check.ok(same(got[i], want[i]), "parameter " .. i) end
          check.ok(same(other.exp_avg, state.exp_avg) and same(other.exp_avg_sq, state.exp_avg_sq), "moments")
        end
      end
    end
  end)

  check.test("paged moments in a compiled step: " .. device, function()
    local function run(compiled)
      local p = ty.linspace(-1, 1, 4096):to(device):requires_grad_()
      local opt = optim.AdamW({ p }, { lr = 0.05, paged = true })
      local function step()
        local loss = (p - 0.5):square():sum()
        opt:step(loss)
        return loss
      end
      if compiled then step = ty.compile(step) end
      for _ = 1, 5 do step() end
      return p
    end
    check.ok(same(run(true), run(false)), "the same numbers")
  end)
end

check.test("not while a program is recorded", function()
  local f, x = ty.compile(function(x) return x:page_memory() end), ty.ones(5)
  f(x)
  check.fails(function() f(x) end, "page_memory: not inside ty.compile")
end)

check.finish()
