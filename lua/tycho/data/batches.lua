--- Making one batch, in the program itself or in a worker thread of a DataLoader.
local datasets = require "tycho.data.dataset"

local M = {}

--- The items at positions i64 [n] as one batch. collate: the loader's own function, in place of the dataset's batch().
-- Draws in the dataset's code are seeded per batch: the same with any number of workers, and after a resume.
function M.make(dataset, positions, seed, collate)
  return datasets.with_seed(seed, function()
    local batch = not collate and dataset.batch and dataset:batch(positions)
    if batch then return batch end
    local items = {}
    for i, position in ipairs(positions:tolist()) do items[i] = dataset:get(position) end
    return (collate or datasets.collate)(items)
  end)
end

return M
