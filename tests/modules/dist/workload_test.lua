-- What ranks train: the rows of a step are the same however many ranks share them, and training by ranks is that of
-- one.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"

local workload = dist.workload
local work = workload.open { length = 12, width = 32, layers = 1, rows = 8, chapters = 20, vocabulary = 300 }

check.test("rows", function()
  local all = workload.rows(work, 3, 7, 0, 6)
  check.equal(all.shape, { 6, 13 })
  check.equal(ty.concat({ workload.rows(work, 3, 7, 0, 2), workload.rows(work, 3, 7, 2, 4) }, 0):tolist(), all:tolist())
  check.equal(all:equal(workload.rows(work, 3, 8, 0, 6)), false)
  check.equal(all:equal(workload.rows(work, 4, 7, 0, 6)), false)
  -- Each is a stretch of the text, and no two of many begin at one place more often than chance has it.
  local text, at = work.training:tolist(), {}
  local row = all[0]:tolist()
  local found = false
  for i = 1, #text - 12 do
    local k = 1
    while k <= 13 and text[i + k - 1] == row[k] do k = k + 1 end
    found = found or k == 14
  end
  check.equal(found, true)
  local many = workload.rows(work, 0, 0, 0, 1000):narrow(1, 0, 4):tolist()
  for _, r in ipairs(many) do at[table.concat(r, " ")] = true end
  local distinct = 0
  for _ in pairs(at) do distinct = distinct + 1 end
  check.equal(distinct > 700, true, distinct)
end)

check.test("what is held out is not in the text that is trained on", function()
  local text = " " .. table.concat(work.training:tolist(), " ") .. " "
  local again = 0
  for _, row in ipairs(work.held_out:tolist()) do
    if text:find(" " .. table.concat(row, " ") .. " ", 1, true) then again = again + 1 end
  end
  check.equal(again <= 2, true, "of eight rows of 13 tokens, a verse that comes twice: " .. again)
end)

check.test("three ranks with two rows each train as one rank with six", function()
  local function steps(group)
    local ty_, d = require "tycho", require "tycho.dist"
    local model = d.workload.model(work, 1)
    local optimizer = ty_.optim.AdamW(model:parameters(), { lr = 1e-2 })
    local buckets = d.buckets(model:parameters(), { bytes = 20000 })
    local share, losses = 6 // group.size, {}
    for step = 1, 4 do
      local loss = d.workload.loss(model, d.workload.rows(work, 0, step, share * group.rank, share))
      optimizer:zero_grad()
      loss:backward()
      buckets:mean_gradients(group)
      optimizer:step()
      losses[step] = group:all_reduce(loss:detach(), "mean"):item()
    end
    losses[5] = d.workload.evaluate(model, work)
    return losses
  end
  local one, three = dist.run(1, steps), dist.run(3, steps)
  check.close(three[1], one[1], 2e-5)
  check.equal(three[2], three[1])
  check.equal(three[1][4] < three[1][1] - 0.2, true, "it learns")
end)

check.test("arguments", function()
  check.fails(function() workload.open { length = 1 } end, "length: expected an integer >= 2")
  check.fails(function() workload.open { length = 10 ^ 9 // 1 | 0 } end, "is longer than the text")
  check.fails(function() workload.rows({}, 0, 0, 0, 1) end, "work: expected what dist.workload.open gives")
  check.fails(function() workload.loss(workload.model(work, 0), ty.ones(3)) end, "rows: expected [n, length + 1]")
end)

check.finish()
