--- What PyTorch calls things: names that are others here, and what to write in place of those that are not there. The
-- page docs/pytorch.md is made from it, and errors about unknown names end with it.
local M = {}

--- By module of PyTorch: its name = ours, where that is another one; false: ours of that name is something else.
M.renamed = {
  torch = {
    adaptive_max_pool1d = "adaptive_max_pool1d", affine_grid_generator = "affine_grid", angle = "complex_angle",
    bilinear = "nn.Bilinear", binary_cross_entropy_with_logits = "bce_with_logits", chain_matmul = "multi_dot",
    clamp_max = "clamp", clamp_min = "clamp", complex = "complex", conj = "complex_conj",
    conj_physical = "complex_conj", cosine_embedding_loss = "nn.cosine_embedding_loss", det = "det",
    igamma = "gammainc", igammac = "gammaincc", initial_seed = "rng_state", inverse = "inverse",
    is_grad_enabled = "is_grad_enabled", logdet = "slogdet", mvlgamma = "mvlgamma", pinverse = "pinv",
    resize = "reshape", scalar_tensor = "tensor", seed = "manual_seed", split_with_sizes = "split",
    unfold = "unfold", range = "arange", arange = "arange", set_num_threads = "set_threads",
    nuclear_norm = "matrix_norm",
    frobenius_norm = "norm", compile = "compile", rms_norm = "rms_norm", lu = "lu", qr = "qr", svd = "svd",
    symeig = "eigh", triangular_solve = "solve_triangular", cholesky_inverse = "cholesky_solve",
    view_as_complex = "complex", view_as_real = "complex", real = "complex", imag = "complex",
    index_reduce = "scatter_reduce", lu_solve = "solve",
    matmul = "matmul", put = "index_put", save = "save", load = "load", from_numpy = "io.load_npy", rand = "rand",
  },
  ["torch.linalg"] = {
    inv = "inverse", cholesky_ex = "cholesky", inv_ex = "inverse", solve_ex = "solve", lu_factor = "lu",
    lu_factor_ex = "lu", polar = false, lu_solve = "solve", vector_norm = "norm", multi_dot = "multi_dot",
    vecdot = "vecdot", eigvals = "eig", svdvals = "svdvals",
  },
  ["torch.special"] = {
    expit = "expit", gammaln = "lgamma", psi = "digamma", multigammaln = "mvlgamma", modified_bessel_i0 = "i0",
    modified_bessel_i1 = "i1", modified_bessel_k0 = "log_bessel_k", modified_bessel_k1 = "log_bessel_k",
    scaled_modified_bessel_k0 = "log_bessel_k", scaled_modified_bessel_k1 = "log_bessel_k", xlog1py = "xlog1py",
  },
  ["torch.nn.functional"] = {
    binary_cross_entropy_with_logits = "bce_with_logits", bilinear = "nn.Bilinear", upsample = "interpolate",
    upsample_bilinear = "interpolate", upsample_nearest = "interpolate", dropout1d = "nn.Dropout1d",
    dropout2d = "nn.Dropout2d", dropout3d = "nn.Dropout3d", alpha_dropout = "nn.AlphaDropout",
    feature_alpha_dropout = "nn.AlphaDropout", embedding_bag = "nn.EmbeddingBag", instance_norm = "nn.InstanceNorm2d",
    local_response_norm = "nn.LocalResponseNorm", multi_head_attention_forward = "nn.MultiheadAttention",
    triplet_margin_with_distance_loss = "nn.triplet_margin_loss",
    max_pool1d_with_indices = "max_pool1d", max_pool2d_with_indices = "max_pool2d",
    max_pool3d_with_indices = "max_pool3d", adaptive_max_pool1d_with_indices = "adaptive_max_pool1d",
    adaptive_max_pool2d_with_indices = "adaptive_max_pool2d",
    adaptive_max_pool3d_with_indices = "adaptive_max_pool3d",
  },
  ["torch.nn"] = {
    NLLLoss2d = "nn.NLLLoss", Softmax2d = "nn.Softmax", UpsamplingBilinear2d = "nn.Upsample",
    UpsamplingNearest2d = "nn.Upsample", CrossMapLRN2d = "nn.LocalResponseNorm", Container = "nn.Module",
    TripletMarginWithDistanceLoss = "nn.TripletMarginLoss", LinearCrossEntropyLoss = "linear_cross_entropy",
    RNNBase = "nn.RNN", RNNCellBase = "nn.RNNCell", ZeroPad2d = "nn.ZeroPad2d",
  },
  ["torch.optim"] = {},
  ["torch.optim.lr_scheduler"] = {
    ConstantLR = "optim.Scheduler", CosineAnnealingLR = "optim.cosine",
    CosineAnnealingWarmRestarts = "optim.cosine_restarts", CyclicLR = "optim.cyclic",
    ExponentialLR = "optim.exponential",
    LambdaLR = "optim.Scheduler", LinearLR = "optim.linear", MultiStepLR = "optim.step",
    MultiplicativeLR = "optim.Scheduler", OneCycleLR = "optim.one_cycle", PolynomialLR = "optim.polynomial",
    SequentialLR = "optim.sequential", StepLR = "optim.step", ReduceLROnPlateau = "optim.ReduceLROnPlateau",
  },
  ["torch.fft"] = {},
  ["torch.sparse"] = {
    sampled_addmm = "sparse.sddmm", sparse_coo_tensor = "sparse.coo", sparse_csr_tensor = "sparse.csr",
  },
}

--- Names that are no functions of PyTorch's reference but stand in most programs: what to do here, by where the name
-- was looked for.
M.hints = {
  ty = {
    autograd = "ty.grad and x:backward() are here; ty.custom_op makes a function with a gradient of its own",
    device = 'devices are texts: { device = "cuda:0" }, x:to "cuda"', hub = 'models are read by require "tycho.hub"',
    utils = "ty.data has data sets and loaders, ty.nn.utils what training loops do with parameters",
    linalg = "its functions are functions of ty: ty.svd(x)", special = "its functions are functions of ty: ty.erfcx(x)",
    distributions = "there is no such part: x:normal_(), x:exponential_(), ty.bernoulli, ty.multinomial, "
      .. "ty.seeded_noise draw",
    distributed = 'ranks are in require "tycho.dist"', jit = "ty.compile records a function",
    onnx = 'require "tycho.hub" has save_onnx, and load reads .onnx files', amp = "ty.autocast and ty.optim.GradScaler",
    func = "ty.grad, ty.vjp, ty.jvp, ty.jacobian, ty.hessian, ty.vmap and ty.functional_call",
    inference_mode = "ty.no_grad(fn)", sparse_coo_tensor = "ty.sparse.coo(indices, values, size)",
    sparse_csr_tensor = "ty.sparse.csr(offsets, columns, values, size)", set_num_threads = "ty.set_threads(n)",
    get_num_threads = "ty.threads()", set_default_dtype = "nn.with_defaults { dtype = ... } and the option dtype",
    set_default_device = "nn.with_defaults { device = ... } and the option device",
    use_deterministic_algorithms = "results do not depend on the number of threads anyway",
    from_numpy = "ty.io.load reads .npy and .npz", backends = "ty.set_threads and ty.cuda have settings",
    vision = "pictures are read by ty.io.load_image and ty.data; networks are in require \"tycho.models\"",
  },
  nn = {
    functional = "its functions are functions of ty and ty.nn: ty.relu(x), nn.cross_entropy(x, y)",
    F = "functions are functions of ty and ty.nn: ty.relu(x), nn.cross_entropy(x, y)",
    DataParallel = 'require "tycho.dist" trains on several ranks', SyncBatchNorm = 'see require "tycho.dist"',
    clip_grad_norm_ = "nn.utils.clip_grad_norm_, or the option clip_norm of optimizers",
    clip_grad_value_ = "nn.utils.clip_grad_value_, or the option clip_value of optimizers",
    parallel = 'see require "tycho.dist"',
  },
  ["nn.utils"] = {
    weight_norm = "nn.weight_norm", spectral_norm = "nn.spectral_norm", parametrize = "nn has parametrizations itself",
    parametrizations = "nn has them itself: nn.weight_norm", prune = 'require "tycho.prune"',
  },
  ["nn.utils.rnn"] = {
    pack_padded_sequence = "the option lengths: lstm(x, { lengths = lengths })",
    pad_packed_sequence = "recurrent layers give padded sequences", PackedSequence = "the option lengths of the layers",
    pack_sequence = "nn.pad_sequence, and the option lengths of the layers",
    unpad_sequence = "x[i]:narrow(0, 0, length)",
  },
  optim = {
    lr_scheduler = "schedules are functions of ty.optim: optim.Scheduler(optimizer, optim.cosine { steps = 1000 }), or "
      .. "the option schedule of an optimizer",
    swa_utils = "optim.EMA averages weights", AveragedModel = "optim.EMA averages weights",
  },
  data = {
    Dataset = "a data set is what data.from_function(count, get) makes, or any table with #set and set:get(i)",
    IterableDataset = "data.stream", Subset = "data.map and data.random_split", random_split = "data.split",
    default_collate = "data.collate", RandomSampler = "the option shuffle of data.DataLoader",
    WeightedRandomSampler = "data.WeightedSampler", BatchSampler = "the option batch_size of data.DataLoader",
    get_worker_info = "workers run the same function with other positions",
  },
  tensor = {
    numpy = "x:tolist(), or ty.io.save_npy(path, x)", grad_fn = "x.is_leaf says whether a tensor has one",
    detach_ = "x = x:detach()", apply_ = "loops over elements are ops: ty.where, ty.custom_op",
    map_ = "loops over elements are ops: ty.where, ty.custom_op", unsqueeze_ = "x = x:unsqueeze(d): shapes stay",
    squeeze_ = "x = x:squeeze(): shapes stay", transpose_ = "x = x:transpose(a, b): shapes stay",
    t_ = "x = x:t(): shapes stay", resize_ = "x = x:reshape(...): shapes stay", to_sparse = "ty.sparse.from_dense(x)",
    to_sparse_csr = 'ty.sparse.from_dense(x, "csr")', to_sparse_coo = "ty.sparse.from_dense(x)",
    element_size = "x.dtype", get_device = "x.device", ndimension = "x.ndim", type = "x.dtype, x:to(dtype)",
    H = "x.mT", storage = "tensors are views: ty.io.to_bytes(x)", is_sparse = "ty.sparse.is_sparse(x)",
    register_post_accumulate_grad_hook = "x:register_hook(fn)", repeat_ = "x:tile(...)",
  },
}

local looked_in = { ty = { "torch", "torch.linalg", "torch.special", "torch.nn.functional", "torch.sparse" },
  nn = { "torch.nn", "torch.nn.functional" }, optim = { "torch.optim", "torch.optim.lr_scheduler" },
  tensor = { "torch" } }

--- What to write in place of a name of PyTorch: the end of an error, or nil.
---@param part string  "ty", "nn", "optim", "data" or "tensor"
---@param name string
---@return string|nil
function M.instead(part, name)
  local hint = M.hints[part] and M.hints[part][name]
  if hint then return ("; of PyTorch's %s: %s"):format(name, hint) end
  for _, module in ipairs(looked_in[part] or {}) do
    local ours = M.renamed[module][name]
    if ours and ours ~= name then
      return ("; what PyTorch calls so is ty.%s here"):format(ours)
    end
  end
  return nil
end

return M
