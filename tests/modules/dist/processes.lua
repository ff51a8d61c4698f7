-- Run by processes_test.lua as a rank of MPI: what it finds wrong it prints, and it ends with status 1.
local ty = require "tycho"
local dist = require "tycho.dist"

local group = dist.world()
local n, wrong = group.size, {}
local what = arg[1]

if what == "fails" then
  if group.rank == n - 1 then error "this rank has had enough" end
  group:receive(n - 1)
elseif what == "exits" then
  if group.rank == 0 then os.exit(3, true) end
  group:barrier()
end

local function same(name, got, want, tolerance)
  local g, w = got:to "f64", want:to "f64"
  local fits = table.concat(g.shape, ",") == table.concat(w.shape, ",")
  local apart = fits and (g:numel() > 0 and (g - w):abs():max():item() or 0) or math.huge
  local allowed = (tolerance or 0) * (1 + (w:numel() > 0 and w:abs():max():item() or 0))
  if apart > allowed then wrong[#wrong + 1] = ("%s: %g apart, %s"):format(name, apart, tostring(g.shape[1])) end
end

local function refused(name, fn, text)
  local ok, problem = pcall(fn)
  if ok or not tostring(problem):find(text, 1, true) then
    wrong[#wrong + 1] = ("%s: %s"):format(name, tostring(problem))
  end
end

for _, dtype in ipairs { "f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8" } do
  local list, wide = {}, {}
  for rank = 1, n do
    ty.manual_seed(rank)
    local x = dtype:find "^[iu]" and ty.randint(0, 5, { 2 * n, 3 }) or ty.randn(2 * n, 3)
    list[rank] = x:to(dtype)
    wide[rank] = list[rank]:to "f64"
  end
  local all, x = ty.stack(wide, 0), list[group.rank + 1]
  local tolerance = ({ f64 = 1e-14, f32 = 1e-6, f16 = 4e-3, bf16 = 3e-2 })[dtype] or 0
  local sum, part = all:sum(0), { 0, 2 * group.rank, 2 }
  same(dtype .. " sum", group:all_reduce(x:clone()), sum, tolerance)
  same(dtype .. " max", group:all_reduce(x:clone(), "max"), all:amax(0), tolerance)
  same(dtype .. " min", group:all_reduce(x:clone(), "min"), all:amin(0), tolerance)
  same(dtype .. " prod", group:all_reduce(x:clone(), "prod"), all:prod(0), tolerance)
  if dtype:find "f" then
    same(dtype .. " mean", group:all_reduce(x:clone(), "mean"), all:mean(0), tolerance)
    same(dtype .. " mean of parts", group:reduce_scatter(x, "mean"), all:mean(0):narrow(table.unpack(part)), tolerance)
  end
  same(dtype .. " part", group:reduce_scatter(x), sum:narrow(table.unpack(part)), tolerance)
  same(dtype .. " gathered", group:all_gather(x), all:reshape(2 * n * n, 3))
  same(dtype .. " root", group:broadcast(x:clone(), n - 1), all[n - 1])
  same(dtype .. " exchanged", group:all_to_all(x), all:narrow(1, 2 * group.rank, 2):reshape(2 * n, 3))
end

local a, b = ty.full({ 100000 }, group.rank), ty.tensor { group.rank }
local first, second = group:all_reduce(a, "sum", { async = true }), group:all_gather(b, { async = true })
same("gathered while another is under way", second:wait(), ty.arange(n))
same("waited for later", first:wait():narrow(0, 99999, 1), ty.tensor { n * (n - 1) // 2 })

local whole = ty.zeros(3 * n)
whole:narrow(0, 3 * group.rank, 3):fill_(group.rank + 1)
group:all_gather(whole:narrow(0, 3 * group.rank, 3), { out = whole })
same("gathered in place", whole:view(n, 3):select(1, 2), ty.arange(n) + 1)

local right, left = (group.rank + 1) % n, (group.rank - 1) % n
for size = 0, 3 do -- all send first, also much
  group:send(ty.full({ 2, size * 50000 }, group.rank):to "bf16", right, size)
end
for size = 3, 0, -1 do same("message", group:receive(left, size), ty.full({ 2, size * 50000 }, left):to "bf16") end

local sub = group:split(group.rank % 2, -group.rank)
same("members", sub:all_gather(ty.tensor(group.rank)), ty.tensor(sub.members))
if group:split(group.rank == 0 and 0 or -1) and group.rank > 0 then wrong[#wrong + 1] = "a group of none" end
group:barrier()
local y = (ty.arange(2 * n):to "f64"):requires_grad_();
(dist.sum_scattered(group, y) * (group.rank + 1)):sum():backward()
same("gradient", y.grad, (ty.arange(2 * n) // 2 + 1))
refused("tag", function() group:send(b, 0, -1) end, "tag: expected 0 to")
refused("rank", function() group:send(b, n) end, "expected a rank of 0 to")
refused("twice", function() ty.core.comm_core.process() end, n > 1 and "is a rank already" or "")
if group:traffic().calls.all_reduce == 0 or group:clock() <= 0 then wrong[#wrong + 1] = "counters" end

for _, line in ipairs(wrong) do io.stderr:write(("rank %d: %s\n"):format(group.rank, line)) end
if #wrong > 0 then os.exit(1, true) end
if group.rank == 0 then print(("fine: %d ranks"):format(n)) end
