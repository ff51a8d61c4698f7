--- Means over batches: what a loss or a share is on data that is not trained on.
local ty = require "tycho"
local arguments = require "tycho.arguments"

--- The mean over the items of batches. fn(batch) returns the sum over the batch's items, or several by name, as numbers
-- or tensors of one; and how many items these are (1). Without gradients, each batch in a scope of its own. Models stay
-- in the mode that they are in.
--
--     local loss = train.evaluate(batches, function(batch)
--       return model:loss(batch.tokens, batch.targets) * batch.count, batch.count
--     end)
---@generic T: number|Tensor|table<string, number|Tensor>
---@param batches any[]
---@param fn fun(batch: any): T, integer?
---@return number|table<string, number>
return function(batches, fn)
  local who = "train.evaluate"
  arguments.expect(who, "batches", batches, "a list")
  arguments.expect(who, "fn", fn, "a function")
  if #batches == 0 then arguments.fail("%s: batches: expected at least one, got none", who) end
  local sums, total, several = {}, 0, false
  local function add(name, value)
    if ty.is_tensor(value) then value = value:item() end
    sums[name] = (sums[name] or 0) + arguments.expect(who, "what fn gives", value, "a number")
  end
  ty.no_grad(function()
    for _, batch in ipairs(batches) do
      ty.scope(function()
        local value, count = fn(batch)
        several = type(value) == "table"
        if several then for name, one in pairs(value) do add(name, one) end else add(1, value) end
        total = total + (arguments.expect(who, "the count that fn gives", count, "a number >= 0 or nil") or 1)
      end)
    end
  end)
  for name, sum in pairs(sums) do sums[name] = sum / total end
  return several and sums or sums[1]
end
